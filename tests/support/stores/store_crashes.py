"""kill -9 at random moments of what changes a store: `make crash`, or this module with --json FILE.

Each round gives a fresh store to a child process that makes changes and tells of each before it starts and
when it is acknowledged. It is killed at a random moment; where the store is in Redis, every other round kills
the server with it, and starts it again. Then a store opened anew must be clean: what was acknowledged is
there and whole, what was under way happened or did not, and nothing else is left.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from adapter_store import AdapterStoreError
from lorafleet.bench.results import head, say, write
from tests.support.stores.crash_scenarios import SCENARIOS, Scenario, Told
from tests.support.stores.garbage import garbage
from tests.support.stores.media import DiskMedium, Medium, RedisMedium
from tests.support.stores.redis_server import BINARY, RedisServer

TIMES = 200


@dataclass(frozen=True, slots=True)
class Result:
    store: str
    operation: str
    times: int
    servers_killed: int
    acknowledged: int  # changes, all rounds together
    caught_under_way: int  # rounds that ended within a change
    of_these_happened: int
    problems: list[str]


def crash(store: str, scenario: Scenario, times: int, folder: Path, seed: int = 0) -> Result:
    """`times` rounds of one kind of change on one kind of store."""
    chance = random.Random(f"{store} {scenario.name} {seed}")
    rounds = _on_disk(folder, times) if store == "disk" else _in_redis(folder, times)
    killed = acknowledged = under_way = happened = 0
    problems = list[str]()
    for number, (medium, server) in enumerate(rounds):
        scenario.prepare(medium)
        told = _killed_child(medium, scenario, chance.uniform(0, scenario.span_s), server)
        killed += server is not None
        acknowledged += sum(each.done for each in told)
        try:
            found = scenario.check(medium, told)
            problems += [f"round {number}: {problem}" for problem in [*found.problems, *garbage(medium)]]
            under_way += found.under_way
            happened += found.happened
        except AdapterStoreError as error:
            problems.append(f"round {number}: {error!r}")
    return Result(store, scenario.name, times, killed, acknowledged, under_way, happened, problems)


def _on_disk(folder: Path, times: int) -> Iterator[tuple[Medium, None]]:
    for number in range(times):
        yield DiskMedium(folder / str(number)), None
        shutil.rmtree(folder / str(number))


def _in_redis(folder: Path, times: int) -> Iterator[tuple[Medium, RedisServer | None]]:
    """A server for many rounds that only kill the client, and one for each of the others."""
    with RedisServer(folder / "shared") as shared:
        for number in range(times):
            if number % 2 == 0:
                yield RedisMedium(shared, f"round-{number}"), None
                continue
            with RedisServer(folder / str(number)) as server:
                yield RedisMedium(server, "round"), server
            shutil.rmtree(folder / str(number))


def _killed_child(
    medium: Medium, scenario: Scenario, after_s: float, server: RedisServer | None
) -> list[Told]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _work(medium, scenario, writer)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        ready = pipe.readline()  # its store is open
        time.sleep(after_s)
        if server is not None:
            server.kill()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        lines = pipe.readlines()
    if not ready:
        raise RuntimeError("the child ended before it began")
    if server is not None:
        server.start()
    return [Told(**json.loads(line)) for line in lines if line.endswith("\n")]


def _work(medium: Medium, scenario: Scenario, writer: int) -> None:
    """In the child. It never returns."""
    try:
        store = medium.open()
        os.write(writer, b"ready\n")
        scenario.act(store, lambda told: os.write(writer, json.dumps(asdict(told)).encode() + b"\n"))
    except AdapterStoreError:
        pass  # its server is gone
    except BaseException as error:
        os.write(2, f"crash child: {error!r}\n".encode())
        os._exit(1)
    time.sleep(60)  # until it is killed
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.stores.store_crashes", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where results go")
    parser.add_argument("--times", type=int, default=TIMES, help=f"rounds of each kind ({TIMES})")
    parser.add_argument("--only", choices=[each.name for each in SCENARIOS], help="one kind of change (all)")
    parser.add_argument("--seed", type=int, default=time.time_ns(), help="of the moments (the clock's)")
    args = parser.parse_args()
    told = head("python -m tests.support.stores.store_crashes") | {"seed": args.seed, "server": _version()}
    results = list[Result]()
    with tempfile.TemporaryDirectory(prefix="lorafleet-crash-") as temporary:
        for make in (each for each in SCENARIOS if args.only in (None, each.name)):
            scenario = make(Path(temporary))
            for store in ("disk", "redis"):
                folder = Path(tempfile.mkdtemp(dir=temporary))
                results.append(crash(store, scenario, args.times, folder, args.seed))
                say(asdict(results[-1]))
    write(args.json, {**told, "results": [asdict(each) for each in results]})
    sys.exit(any(each.problems for each in results))


def _version() -> str:
    """The server's, in one line."""
    return subprocess.run([BINARY, "--version"], capture_output=True, text=True).stdout.partition("\n")[0]


if __name__ == "__main__":
    main()
