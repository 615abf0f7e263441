"""Executors come and go under streams with known answers, told of by DNS or by a file: none may be lost.

`make elastic` does it under 200 streams and writes what it saw; tests/faults/test_elastic.py under a few.
Services are real processes, executors around an engine that only sleeps. Streams are plain gRPC: no client of
ours is there that would take up a broken one again.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import grpc

from executor.bench.paced import paced_token
from lorafleet.bench.results import Results, head
from lorafleet.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.support.adapters.peft import make_base
from tests.support.adapters.tokenizers import byte_level, write_folder
from tests.support.chaos.counting import Dispatches
from tests.support.services.cluster import PATIENCE_S, Cluster, Node
from tests.support.services.name_server import NameServer, name_server

FORMS = ("dns", "file")
NAME = "fleet.test"
PROMPT = (7, 8)
PER_CONNECTION = 64  # Streams; a scheduler takes 100.
REACHED_S = 20.0  # Until which a new executor has its share.
SHARE_S = 10.0  # In the last of which it is counted.
_APART = [("grpc.use_local_subchannel_pool", 1)]


@dataclass(frozen=True)
class Load:
    """`streams` at any time, of `tokens` tokens each, a step of executors every `step_ms`."""

    streams: int = 200
    tokens: int = 40
    step_ms: float = 200
    seats: int = 256
    interval_s: float = 5.0
    slow_start_s: float = 10.0


@dataclass(frozen=True)
class Seen:
    """One change, under `streams` at any time.

    answers   of streams that ended meanwhile, whole and with the right tokens
    problems  what others ended with, or had instead: must be empty
    first_s   by executor that came: seconds from its readiness, when it was told of, to its first request
    share     of the same: requests from 10 to 20 s after that, as a part of a fair share
    late      requests that those that left got more than an interval (and a second for counting) afterwards
    """

    form: str
    change: str
    streams: int
    answers: int
    problems: dict[str, int]
    first_s: list[float]
    share: list[float]
    late: int
    seconds: float


class Place(Protocol):
    """Where it stands who the executors are."""

    @property
    def flag(self) -> str: ...

    def tell(self, nodes: Sequence[Node]) -> None: ...


class InDns:
    def __init__(self, names: NameServer) -> None:
        self._names = names
        self.flag = names.target(NAME, 1)

    def tell(self, nodes: Sequence[Node]) -> None:
        ports = [node.address.rpartition(":")[2] for node in nodes]
        targets = [f"{node.name}.{NAME}" for node in nodes]
        for target in targets:
            self._names.put(target, "A", ["127.0.0.1"])
        records = [f"0 10 {port} {target}." for port, target in zip(ports, targets, strict=True)]
        self._names.put(f"_grpc._tcp.{NAME}", "SRV", records)


class InFile:
    def __init__(self, file: Path) -> None:
        self._file = file
        self.flag = f"file:{file}"
        file.write_text("127.0.0.1:1 nobody\n")  # An empty file is none.

    def tell(self, nodes: Sequence[Node]) -> None:
        new = self._file.with_suffix(".new")
        new.write_text("".join(f"{node.address} {node.name}\n" for node in nodes))
        new.replace(self._file)


class Scene:
    """A scheduler that is told of executors by one place."""

    def __init__(self, cluster: Cluster, form: str, place: Place, load: Load, executors: int) -> None:
        self.load, self._form, self._place = load, form, place
        seats = ("--max-seats", str(load.seats), "--max-loras", "2", "--max-lora-rank", "8")
        self.executors = [cluster.executor(f"{form}-{number}", *seats) for number in range(executors)]
        for node in self.executors:
            node.program = "executor.bench.paced"
            node.environment["STEP_MS"] = str(load.step_ms)
        self.scheduler = cluster.scheduler(
            f"elastic-{form}",
            [place.flag],
            *("--discovery-interval", str(load.interval_s), "--slow-start", str(load.slow_start_s)),
            *("--max-queued", "1024", "--max-queued-per-tenant", "1024"),
        )

    async def start(self, first: int) -> None:
        """Executors are all there, and the scheduler knows the first ones."""
        self.tell(first)
        nodes = [*self.executors, self.scheduler]
        for node in nodes:
            node.start()
        for node in nodes:
            await asyncio.to_thread(node.wait_ready)

    def tell(self, count: int) -> None:
        """The executors are the first ones from now on."""
        self._place.tell(self.executors[:count])

    async def change(self, before: int, after: int, crowd: "Crowd", lasts_s: float) -> Seen:
        """From the first `before` executors to the first `after`."""
        began, answers = time.monotonic(), crowd.answers
        counted = Dispatches(self.executors)
        counting = asyncio.create_task(counted.run())
        self.tell(after)
        await asyncio.sleep(lasts_s)
        counting.cancel()
        await asyncio.wait([counting])
        joined, left = range(before, after), range(after, before)
        until = min(REACHED_S, lasts_s)
        return Seen(
            self._form,
            f"{before} to {after}",
            streams=self.load.streams,
            answers=crowd.answers - answers,
            problems=dict(Counter(crowd.problems)),
            first_s=[counted.first(number) for number in joined],
            share=[counted.share(number, until - SHARE_S, until, after) for number in joined],
            late=sum(counted.after(number, self.load.interval_s + 1.0) for number in left),
            seconds=round(time.monotonic() - began, 1),
        )


class Crowd:
    """Streams that ask one question after the other, and check what comes."""

    def __init__(self, scheduler: Node, load: Load) -> None:
        self._scheduler, self._load = scheduler, load
        self.answers = 0
        self.problems: list[str] = []
        self._stops = False

    @asynccontextmanager
    async def asking(self) -> AsyncIterator["Crowd"]:
        """At its end each asks for no more, and has read its last answer."""
        async with AsyncExitStack() as stack:
            stubs = []
            for _ in range(-(-self._load.streams // PER_CONNECTION)):
                channel = grpc.aio.insecure_channel(self._scheduler.address, options=_APART)
                stubs.append(inference_pb2_grpc.InferenceStub(await stack.enter_async_context(channel)))
            tasks = [
                asyncio.create_task(self._ask(stubs[number % len(stubs)], number))
                for number in range(self._load.streams)
            ]
            try:
                yield self
            finally:
                self._stops = True
                await asyncio.gather(*tasks)

    async def _ask(self, stub: inference_pb2_grpc.InferenceStub, number: int) -> None:
        load = self._load
        # Not all at once, for else all would end at once, too.
        await asyncio.sleep(number / load.streams * load.tokens * load.step_ms / 1000)
        while not self._stops:
            if problem := await self._answer(stub):
                self.problems.append(problem)
            else:
                self.answers += 1

    async def _answer(self, stub: inference_pb2_grpc.InferenceStub) -> str:
        """What is wrong with one; nothing, as a rule."""
        stopping = common_pb2.Stopping(max_new_tokens=self._load.tokens, ignore_eos=True)
        asked = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=PROMPT), stopping=stopping)
        tokens: list[int] = []
        try:
            async for chunk in stub.GenerateStream(asked, timeout=PATIENCE_S):
                tokens += chunk.token_ids
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        right = [paced_token(PROMPT, index) for index in range(self._load.tokens)]
        return "" if tokens == right else f"another answer, of {len(tokens)} tokens"


@asynccontextmanager
async def place_of(form: str, folder: Path) -> AsyncIterator[Place]:
    if form == "file":
        yield InFile(folder / "fleet")
        return
    async with name_server() as names:
        yield InDns(names)


async def run(cluster: Cluster, form: str, load: Load) -> list[Seen]:
    """From 1 executor to 4, and to 2."""
    async with place_of(form, cluster.folder) as place:
        scene = Scene(cluster, form, place, load, executors=4)
        await scene.start(first=1)
        answer_s = load.tokens * load.step_ms / 1000
        async with Crowd(scene.scheduler, load).asking() as crowd:
            await asyncio.sleep(answer_s + load.slow_start_s)  # A fleet that begins knows no slow start.
            up = await scene.change(1, 4, crowd, REACHED_S + 2)
            down = await scene.change(4, 2, crowd, load.interval_s + answer_s + 4)
        for node in [scene.scheduler, *scene.executors]:
            await asyncio.to_thread(node.stop)
        return [up, down]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.chaos.elastic", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where results go")
    parser.add_argument("--streams", type=int, default=200)
    args = parser.parse_args()
    said, load = head("python -m tests.support.chaos.elastic"), Load(streams=args.streams)
    seen: list[Seen] = []
    with tempfile.TemporaryDirectory() as folder:
        model = make_base(Path(folder) / "model", vocab_size=448, max_position_embeddings=4096)
        write_folder(model, byte_level())
        for form in FORMS:
            with Cluster(model, Path(folder)) as cluster:
                seen += asyncio.run(run(cluster, form, load))
    results = Results(args.json, {**said, "load": asdict(load)})
    for each in seen:
        results.add(asdict(each))
    sys.exit(any(each.problems for each in seen))


if __name__ == "__main__":
    main()
