"""Whether every answer whose end a client saw has one usage record, whatever happens to the fleet meanwhile.

Schedulers and executors are killed and frozen, disks of ledgers fill, the Redis goes and comes back. `make
bills` does it for a quarter of an hour, and writes what it saw; tests/faults/test_bills.py does each once.
"""

import argparse
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lorafleet import Chunk, Client, LoraFleetError
from lorafleet.bench.results import head, say, write
from lorafleet.usage.merge import Merged
from lorafleet.usage.record import FINISHED, UNSEEN
from lorafleet.usage.sources import RedisStreams
from tests.support.adapters.peft import load_base, make_adapter, make_base
from tests.support.adapters.tokenizers import byte_level, write_folder
from tests.support.chaos.full_disks import Disk, FullByLimit, small_disk
from tests.support.chaos.run import NEVER
from tests.support.ledger import answers_in
from tests.support.services.cluster import Cluster, Node, wait_until
from tests.support.stores.redis_server import RedisServer

PREFIX = [30, 41, 52, 63, 74] * 8  # Of all prompts: its blocks are shared, so that some tokens are cached.
UNWRITTEN = "ledger_unwritten_records"


@dataclass
class World:
    """What all threads share. ends: the last chunks that clients got."""

    ends: list[Chunk] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    troubles: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Seen:
    """What the ledger had in the end.

    ends         answers whose end a client saw
    recorded     those of them with one record, of exactly what their client was told: must be all
    taken_up     those of them that had been taken up from another part
    unseen       records of ends that nobody saw, by outcome; untold: answers that ended well in the ledger,
                 and whose clients did not see it: they had left by then, or their connection had
    in_redis     answers that the Redis has, as the files do: must be all of `answers`
    lost         records that schedulers dropped: must be 0
    """

    answers: int
    ends: int
    recorded: int
    taken_up: int
    unseen: dict[str, int]
    failed: dict[str, int]
    untold: int
    repeated_tokens: int
    in_redis: int
    lost: int
    outcomes: dict[str, int]
    troubles: dict[str, int]
    problems: list[str]


class Caller:
    """Asks one thing after the other. Now and then it leaves in the middle, or connects anew: to the first
    scheduler of its list that is there."""

    def __init__(self, world: World, schedulers: Sequence[str], adapters: Sequence[str], seed: int) -> None:
        self._world, self._schedulers, self._adapters = world, schedulers, adapters
        self._draw = random.Random(seed)

    def run(self) -> None:
        while not self._world.over.is_set():
            target = ",".join(self._draw.sample(self._schedulers, len(self._schedulers)))
            with Client(f"ipv4:{target}", timeout=180, resume_timeout=90) as client:
                for _ in range(10):
                    if not self._world.over.is_set():
                        self.ask_once(client)

    def ask_once(self, client: Client) -> None:
        try:
            self._ask(client)
        except LoraFleetError as error:
            if isinstance(error, NEVER):
                self._world.problems.append(f"{type(error).__name__} {error.reason}: {error}")
            self._world.outcomes[error.reason or error.code.name] += 1
            time.sleep(0.2)

    def _ask(self, client: Client) -> None:
        draw = self._draw
        prompt = PREFIX + [draw.randrange(3, 400) for _ in range(draw.randrange(12))]
        leaves_after = draw.randrange(40) if draw.random() < 0.1 else 10**6
        stream = client.stream(
            prompt,
            adapter=draw.choice((None, *self._adapters)),
            max_new_tokens=draw.randint(1, 100),
            temperature=draw.choice((0, 0.8)),
        )
        for chunk in stream:
            if chunk.finish_reason:
                self._world.ends.append(chunk)
                self._world.outcomes[chunk.finish_reason] += 1
            elif chunk.output_index >= leaves_after:
                stream.close()
                self._world.outcomes["left"] += 1


class Fleet:
    """Services over a Redis; each scheduler's ledger is on a disk of its own, which may fill."""

    def __init__(self, cluster: Cluster, redis: RedisServer, disks: list[Disk], executors: int) -> None:
        cluster.store_url = f"{redis.url}?timeout=2"
        self.redis, self.disks, self.world = redis, disks, World()
        slots = ("--max-loras", "2", "--max-lora-rank", "8", "--block-size", "8", "--max-model-len", "256")
        self.executors = [cluster.executor(f"bills-{n}", *slots) for n in range(executors)]
        common = ("--drain-timeout", "2", "--alias-max-staleness", "10", "--queue-timeout", "60")
        self.schedulers = [
            cluster.scheduler(f"bills-s{n}", self.executors, *common, "--ledger-dir", str(disk.folder))
            for n, disk in enumerate(disks)
        ]
        self._adapters: tuple[str, ...] = ()
        self._redis_is_up = threading.Lock()  # Services cannot start without it.

    def start(self, adapters: Mapping[str, Path]) -> None:
        self._adapters = tuple(adapters)
        for node in (*self.executors, *self.schedulers):
            node.start()
        for node in (*self.executors, *self.schedulers):
            node.wait_ready()
        with Client(self.schedulers[0].address, timeout=120) as client:
            for name, folder in adapters.items():
                client.adapters.push(folder, name)

    @contextmanager
    def under_traffic(self, callers: int, seed: int) -> Iterator[None]:
        addresses = [node.address for node in self.schedulers]
        asking = [Caller(self.world, addresses, self._adapters, seed + n).run for n in range(callers)]
        threads = [threading.Thread(target=self._guarded(ask), daemon=True) for ask in asking]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.world.over.set()
            for thread in threads:
                thread.join(240)
            if any(thread.is_alive() for thread in threads):
                self.world.problems.append("a caller never ends")

    def kill(self, node: Node, away_s: float = 0.0) -> None:
        self.world.troubles[f"kill {node.module}"] += 1
        node.kill()
        self._start_again(node, away_s)

    def drain(self, node: Node, away_s: float = 0.0) -> None:
        self.world.troubles[f"drain {node.module}"] += 1
        node.terminate()
        node.wait()
        self._start_again(node, away_s)

    def freeze(self, node: Node, seconds: float) -> None:
        self.world.troubles[f"freeze {node.module}"] += 1
        node.signal(signal.SIGSTOP)
        time.sleep(seconds)
        node.signal(signal.SIGCONT)

    def fill(self, number: int, seconds: float) -> None:
        """Until the scheduler has noticed, for some seconds, and until it has written all it kept."""
        self.world.troubles["full disk"] += 1
        node, disk = self.schedulers[number], self.disks[number]
        with disk.full(node.process.pid), Client(node.address, timeout=5) as client:
            # All others may be at another scheduler.
            asking = Caller(self.world, [node.address], (), number)
            wait_until(lambda: node.gauge(UNWRITTEN) or asking.ask_once(client), "a ledger is not written")
            time.sleep(seconds)
        wait_until(lambda: not node.gauge(UNWRITTEN), "the ledger is written again")

    def take_redis_away(self, seconds: float, *, killed: bool = True) -> None:
        self.world.troubles["redis killed" if killed else "redis frozen"] += 1
        with self._redis_is_up:
            self.redis.kill() if killed else self.redis.pause()
            time.sleep(seconds)
            self.redis.start() if killed else self.redis.go_on()

    def seen(self) -> Seen:
        """When all is quiet, and shipped."""
        folders = [disk.folder for disk in self.disks]
        answers = answers_in(folders)

        def in_redis() -> dict[str, Merged]:
            return answers_in((), RedisStreams(f"{self.redis.url}?timeout=2", "").lines())

        wait_until(lambda: in_redis().keys() == answers.keys(), "all records are shipped")
        told = {chunk.answer_id.partition(".")[0]: chunk for chunk in self.world.ends}
        wrong = [key for key, chunk in told.items() if not _is_recorded(chunk, answers.get(key))]
        for key in wrong[:5]:
            self.world.problems.append(f"told {told[key]}, recorded {answers.get(key)}")
        rest = [merged.record for key, merged in answers.items() if key not in told]
        by_outcome = Counter(record.outcome for record in rest)
        unseen = {each: count for each, count in by_outcome.items() if each in UNSEEN}
        finished = sum(count for each, count in by_outcome.items() if each in FINISHED)
        return Seen(
            answers=len(answers),
            ends=len(told),
            recorded=len(told) - len(wrong),
            taken_up=sum(not chunk.answer_id.endswith(".0") for chunk in told.values()),
            unseen=unseen,
            failed={each: count for each, count in by_outcome.items() if each not in FINISHED | UNSEEN},
            untold=finished,
            repeated_tokens=sum(merged.repeated for merged in answers.values()),
            in_redis=sum(answers[key].record == merged.record for key, merged in in_redis().items()),
            lost=sum(node.log().count("a usage record is not in the ledger") for node in self.schedulers),
            outcomes=dict(sorted(self.world.outcomes.items())),
            troubles=dict(sorted(self.world.troubles.items())),
            problems=self.world.problems,
        )

    def _start_again(self, node: Node, away_s: float) -> None:
        time.sleep(away_s)
        with self._redis_is_up:
            node.start().wait_ready()

    def _guarded(self, run: Callable[[], None]) -> Callable[[], None]:
        def guarded() -> None:
            try:
                run()
            except Exception as error:
                self.world.problems.append(f"{run}: {error!r}")
                self.world.over.set()

        return guarded

    def trouble(self, seconds: float, seed: int) -> None:
        """All kinds, by chance; the Redis goes whatever else happens. No scheduler is killed while its disk
        is full: what it has in memory then would go with it."""
        ends_at = time.monotonic() + seconds
        runs = (self._trouble_services, self._trouble_redis)
        threads = [
            threading.Thread(target=self._guarded(lambda run=run: run(ends_at, random.Random(seed))))  # type: ignore[misc]
            for run in runs
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _goes_on(self, ends_at: float) -> bool:
        return time.monotonic() < ends_at and not self.world.problems

    def _trouble_services(self, ends_at: float, draw: random.Random) -> None:
        while self._goes_on(ends_at):
            time.sleep(draw.uniform(0.5, 4))
            number = draw.randrange(len(self.schedulers))
            scheduler, executor = self.schedulers[number], draw.choice(self.executors)
            match draw.choice(("kill", "kill", "kill executor", "freeze", "drain", "fill")):
                case "kill":
                    self.kill(scheduler, draw.choice((0, 1)))
                case "kill executor":
                    self.kill(executor, draw.choice((0, 1)))
                case "freeze":
                    self.freeze(draw.choice((scheduler, executor)), draw.choice((0.2, 1, 4)))
                case "drain":
                    self.drain(draw.choice((scheduler, executor)))
                case "fill":
                    self.fill(number, draw.uniform(0.5, 4))

    def _trouble_redis(self, ends_at: float, draw: random.Random) -> None:
        while self._goes_on(ends_at):
            time.sleep(draw.uniform(5, 20))
            self.take_redis_away(draw.uniform(0.2, 8), killed=draw.random() < 0.7)


def _is_recorded(chunk: Chunk, merged: Merged | None) -> bool:
    """Exactly as the client was told."""
    if merged is None or chunk.usage is None or chunk.finish_reason is None:
        return False
    record, usage = merged.record, chunk.usage
    return (
        record.outcome == chunk.finish_reason.name
        and record.digest == chunk.adapter_digest
        and record.prompt == usage.prompt_tokens
        and record.cached == usage.cached_prompt_tokens
        and record.output == usage.completion_tokens
    )


@contextmanager
def running(
    model: Path, folder: Path, schedulers: int, executors: int, adapters: Mapping[str, Path], program: str
) -> Iterator[Fleet]:
    """A fleet that is ready; `program` is what its executors run."""
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(folder / "redis"))
        disks = [stack.enter_context(small_disk(folder / f"ledger-{n}")) for n in range(schedulers)]
        cluster = stack.enter_context(Cluster(model, folder))
        fleet = Fleet(cluster, redis, disks, executors)
        for node in fleet.executors:
            node.program = program
            node.environment["STEP_MS"] = "10"  # For paced ones.
        fleet.start(adapters)
        yield fleet


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.chaos.bills", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where results go")
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--callers", type=int, default=10)
    parser.add_argument("--seed", type=int, default=round(time.time()))
    args = parser.parse_args()
    said = head("python -m tests.support.chaos.bills")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_base(folder / "model", vocab_size=448, std=0.15, max_position_embeddings=4096)
        write_folder(model, byte_level())
        base = load_base(model)
        adapters = {name: make_adapter(folder / name, base, seed=seed) for seed, name in enumerate("ab")}
        with running(model, folder, 2, 2, adapters, "executor") as fleet:
            with fleet.under_traffic(args.callers, args.seed):
                fleet.trouble(args.seconds, args.seed)
            seen = fleet.seen()
            disk = "by limit" if isinstance(fleet.disks[0], FullByLimit) else "tmpfs"
    result = {**said, "seconds": args.seconds, "seed": args.seed, "disks": disk, "seen": asdict(seen)}
    write(args.json, result)
    say(asdict(seen))
    sys.exit(bool(seen.problems or seen.lost or seen.recorded < seen.ends or seen.in_redis < seen.answers))


if __name__ == "__main__":
    main()
