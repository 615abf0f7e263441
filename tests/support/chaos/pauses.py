"""Streams with known answers while their scheduler dies or stands still: none may be lost, repeated or wrong.

`make chaos` does it for long, and writes what it saw; tests/faults/test_pauses.py for a moment. Executors are
real processes around an engine that only sleeps, so that thousands of tokens a second cost next to nothing.
"""

import argparse
import asyncio
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from executor.bench.paced import paced_token
from lorafleet import AsyncClient, LoraFleetError, Unavailable
from lorafleet.bench.results import Results, head
from tests.support.adapters.peft import make_base
from tests.support.adapters.tokenizers import byte_level, write_folder
from tests.support.services.cluster import Cluster, Node

WAYS = ("kill", "stop", "hold")
SEATS = ("--max-seats", "256", "--max-loras", "2", "--max-lora-rank", "8")
QUEUE = ("--max-queued", "4096", "--max-queued-per-tenant", "4096", "--max-admitting", "4096")


@dataclass(frozen=True)
class Load:
    """Streams of `tokens` tokens each, a step of executors every `step_ms`; a pause lasts `pause_s`.

    A fifth as many `late` streams come while their scheduler is away. `report_timeout_s` is the schedulers'.
    """

    streams: int
    tokens: int
    executors: int
    schedulers: int
    step_ms: float
    pause_s: float
    report_timeout_s: float = 3.0

    @property
    def late(self) -> int:
        return self.streams // 5


@dataclass(frozen=True)
class Seen:
    """What became of the streams in one disturbance.

    way           "kill": the first scheduler is killed and started again; "stop": SIGSTOP, and after the
                  pause SIGCONT; "hold": a native call keeps the interpreter's lock for so long
    whole         streams whose answer is the known one, of `streams` that had a token when it began
    late_whole    the same of the `late` ones that came while it lasted
    late_refused  those of them that found nobody who would accept them, and were told so
    problems      what any others ended with, and how many of them: must be empty
    hung          how often a scheduler took an executor for hung: must be 0
    """

    way: str
    streams: int
    whole: int
    late: int
    late_whole: int
    late_refused: int
    problems: dict[str, int]
    hung: int
    seconds: float


class Scene:
    """A running fleet, and a client that knows all of its schedulers."""

    def __init__(self, cluster: Cluster, load: Load) -> None:
        self._load = load
        self._executors = [
            cluster.executor(f"paced-{load.schedulers}-{number}", *SEATS) for number in range(load.executors)
        ]
        for node in self._executors:
            node.program = "executor.bench.paced"
            node.environment["STEP_MS"] = str(load.step_ms)
        report = ("--report-timeout", str(load.report_timeout_s))
        self._schedulers = [
            cluster.scheduler(f"scheduler-{load.schedulers}-{number}", self._executors, *QUEUE, *report)
            for number in range(load.schedulers)
        ]
        for node in self._schedulers:
            node.program = "tests.support.chaos.held_scheduler"
            node.environment["HOLD_S"] = str(load.pause_s)

    def start(self) -> None:
        nodes = [*self._executors, *self._schedulers]
        for node in nodes:
            node.start()
        for node in nodes:
            node.wait_ready()

    async def disturb(self, way: str) -> Seen:
        """One disturbance in the middle of all streams, and what became of them."""
        load, began, hung = self._load, time.monotonic(), self._hung()
        addresses = ",".join(node.address for node in self._schedulers)
        async with AsyncExitStack() as stack:
            # A call for itself each, on a few connections: a client's own process is no bottleneck then.
            clients = [await stack.enter_async_context(AsyncClient(f"ipv4:{addresses}")) for _ in range(8)]
            streams = [Stream(number, load.tokens) for number in range(load.streams + load.late)]
            early, late = streams[: load.streams], streams[load.streams :]
            tasks = [asyncio.create_task(each.read(clients[each.number % 8])) for each in early]
            await asyncio.gather(*(each.begun.wait() for each in early))
            disturbing = asyncio.create_task(asyncio.to_thread(self._act, way, self._schedulers[0]))
            await asyncio.sleep(load.pause_s / 4)
            tasks += [asyncio.create_task(each.read(clients[each.number % 8])) for each in late]
            await disturbing
            await asyncio.gather(*tasks)
        return Seen(
            way,
            streams=len(early),
            whole=sum(not each.problem for each in early),
            late=len(late),
            late_whole=sum(not each.problem for each in late),
            late_refused=sum(each.refused for each in late),
            problems=dict(Counter(each.problem for each in streams if each.problem and not each.refused)),
            hung=self._hung() - hung,
            seconds=round(time.monotonic() - began, 1),
        )

    def _act(self, way: str, scheduler: Node) -> None:
        if way == "kill":
            scheduler.kill()
            time.sleep(self._load.pause_s / 2)
            scheduler.start().wait_ready()
        elif way == "stop":
            scheduler.signal(signal.SIGSTOP)
            time.sleep(self._load.pause_s)
            scheduler.signal(signal.SIGCONT)
        else:
            scheduler.signal(signal.SIGUSR1)
            time.sleep(self._load.pause_s)

    def _hung(self) -> int:
        return sum(node.log().count(" HUNG ") for node in self._schedulers)


class Stream:
    """One of them: `problem` says what is wrong with its answer, once `read` has ended."""

    def __init__(self, number: int, tokens: int) -> None:
        self.number, self.problem = number, ""
        self.refused = False
        self.begun = asyncio.Event()
        self._prompt = [3 + number % 400, 3 + number // 400]
        self._expected = [paced_token(self._prompt, index) for index in range(tokens)]

    async def read(self, client: AsyncClient) -> None:
        tokens: list[int] = []
        try:
            async for chunk in client.stream(self._prompt, max_new_tokens=len(self._expected)):
                tokens += chunk.token_ids
                self.begun.set()
        except LoraFleetError as error:
            self.problem = f"{error.code.name} {error.reason or error.message}"
            self.refused = isinstance(error, Unavailable) and not self.begun.is_set()
        else:
            self.problem = "" if tokens == self._expected else "another answer"
        self.begun.set()


async def run(cluster: Cluster, load: Load, ways: Sequence[str]) -> list[Seen]:
    scene = Scene(cluster, load)
    await asyncio.to_thread(scene.start)
    return [await scene.disturb(way) for way in ways]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.chaos.pauses", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where results go")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=300, help="of each answer")
    parser.add_argument("--executors", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=300)
    parser.add_argument("--pause", type=float, default=55, help="seconds that a scheduler stands still")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    args = parser.parse_args()
    results = Results(args.json, head("python -m tests.support.chaos.pauses"))
    for schedulers in (1, 2):
        load = Load(args.streams, args.tokens, args.executors, schedulers, args.step_ms, args.pause)
        with tempfile.TemporaryDirectory() as folder:
            model = make_base(Path(folder) / "model", vocab_size=448, max_position_embeddings=4096)
            write_folder(model, byte_level())
            with Cluster(model, Path(folder)) as cluster:
                seen = asyncio.run(run(cluster, load, args.ways))
        results.add({**asdict(load), "disturbances": [asdict(each) for each in seen]})


if __name__ == "__main__":
    main()
