"""Hostile clients against real services, and an honest tenant beside them: `make fuzz`.

Each way of tests/support/flood/flooders.py runs in a process of its own, against the scheduler and against
the executor. tests/faults/test_flood.py does a little of it.
"""

import argparse
import asyncio
import hashlib
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lorafleet.bench.results import Results, head
from lorafleet.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.support.adapters.peft import make_base
from tests.support.adapters.tokenizers import byte_level, write_folder
from tests.support.flood.flooders import TENANTS_WAYS, WAYS
from tests.support.flood.http2 import Metadata
from tests.support.services.cluster import ROOT, Cluster, Node

TOKEN, HOSTILE_TOKEN = "honest-token", "hostile-token"
CALL_S = 5.0  # An honest call that takes longer has failed.
EVERY_S = 0.04
PROBE_EVERY_S = 0.5
MAX_MORE_MB = 300
MIN_KEPT = 0.95
MAX_P99_MS = 500.0


@dataclass(frozen=True)
class Seen:
    """What some ways did together in `seconds`.

    service            whose port they went to
    quiet_mb, peak_mb  RSS of that service before all floods, and at most
    tracebacks         in its log, and all lines that came to it
    calls, kept        of the honest tenant, and those that were answered in time
    problems           what the others ended with
    probes_failed      of the health probes of that service
    """

    ways: list[str]
    service: str
    seconds: float
    quiet_mb: int
    peak_mb: int
    tracebacks: int
    log_lines: int
    calls: int
    kept: int
    p50_ms: float
    p99_ms: float
    problems: dict[str, int]
    probes: int
    probes_failed: int

    def faults(self) -> list[str]:
        """What must not be."""
        checks = {
            f"{self.peak_mb} MB of memory": self.peak_mb > self.quiet_mb + MAX_MORE_MB,
            f"{self.tracebacks} tracebacks": self.tracebacks > 0,
            f"{self.kept} of {self.calls} calls kept": self.kept < MIN_KEPT * self.calls,
            f"p99 of {self.p99_ms:g} ms": self.p99_ms > MAX_P99_MS,
        }
        return [text for text, wrong in checks.items() if wrong]


Ask = Callable[[grpc.aio.Channel, Metadata], Awaitable[None]]
"""One call of the honest tenant, in CALL_S."""


def ask_for_tokens(count: int) -> Ask:
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[5, 6, 7]), stopping=common_pb2.Stopping(max_new_tokens=count)
    )

    async def ask(channel: grpc.aio.Channel, metadata: Metadata) -> None:
        await inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=metadata, timeout=CALL_S)

    return ask


ask_for_answer = ask_for_tokens(3)


class Honest:
    """A tenant who asks, by default for short answers, at a steady pace, waiting for none of them."""

    def __init__(self, address: str, ask: Ask = ask_for_answer, every_s: float = EVERY_S) -> None:
        self._address = address
        self._ask, self._every_s = ask, every_s
        self._took_s: list[float] = []
        self._problems = Counter[str]()
        self._calls: set[asyncio.Task[None]] = set()

    async def run(self, stop: asyncio.Event) -> tuple[list[float], dict[str, int]]:
        """Seconds that each answer took, and how the calls without one ended."""
        async with grpc.aio.insecure_channel(self._address, options=_OWN_CONNECTION) as channel:
            while not stop.is_set():
                task = asyncio.create_task(self._call(channel))
                self._calls.add(task)
                task.add_done_callback(self._calls.discard)
                await asyncio.sleep(self._every_s)
            await asyncio.gather(*self._calls)
        return self._took_s, dict(self._problems)

    async def _call(self, channel: grpc.aio.Channel) -> None:
        began = time.monotonic()
        try:
            await self._ask(channel, (("authorization", f"Bearer {TOKEN}"),))
            self._took_s.append(time.monotonic() - began)
        except grpc.aio.AioRpcError as error:
            self._problems[f"{error.code().name}: {(error.details() or '')[:120]}"] += 1


class Scene:
    """A scheduler with a token file, and an executor that only sleeps."""

    def __init__(self, cluster: Cluster, *scheduler: str) -> None:
        tokens = cluster.folder / "tokens.toml"
        tokens.write_text(token_entry(TOKEN, "honest") + token_entry(HOSTILE_TOKEN, "hostile"))
        self._quiet_mb: dict[str, int] = {}
        self._executor = cluster.executor("executor", "--max-seats", "64", "--max-lora-rank", "8")
        self._executor.program = "executor.bench.paced"
        self._executor.environment["STEP_MS"] = "5"
        self._scheduler = cluster.scheduler(
            "scheduler", [self._executor], "--tokens-file", str(tokens), *scheduler
        )
        self._scheduler.environment["MALLOC_ARENA_MAX"] = "2"  # As in its image.

    def start(self) -> None:
        for node in (self._executor, self._scheduler):
            node.start()
        for node in (self._executor, self._scheduler):
            node.wait_ready()
            self._quiet_mb[node.module] = _rss_mb(node)

    @property
    def address(self) -> str:
        """The scheduler's."""
        return self._scheduler.address

    async def flood(
        self,
        ways: Sequence[str],
        service: str,
        seconds: float,
        token: str = "",
        ask: Ask = ask_for_answer,
        every_s: float = EVERY_S,
    ) -> Seen:
        """token: of who floods; nobody knows them without. The honest tenant asks so, and so often."""
        node = self._scheduler if service == "scheduler" else self._executor
        log, peak = node.log(), 0
        stop = asyncio.Event()
        honest = asyncio.create_task(Honest(self.address, ask, every_s).run(stop))
        probing = asyncio.create_task(_probe(node, stop))
        with ExitStack() as stack:
            for way in ways:
                stack.enter_context(_flooder(way, node.address, token))
            ends = time.monotonic() + seconds
            while time.monotonic() < ends:
                peak = max(peak, _rss_mb(node))
                await asyncio.sleep(0.05)
            stop.set()
            took, problems = await honest
            probes, failed = await probing
        news = node.log()[len(log) :]
        took.sort()
        return Seen(
            list(ways),
            service,
            seconds,
            quiet_mb=self._quiet_mb[service],
            peak_mb=peak,
            tracebacks=news.count("Traceback (most recent call last)"),
            log_lines=news.count("\n"),
            calls=len(took) + sum(problems.values()),
            kept=len(took),
            p50_ms=_percentile_ms(took, 0.5),
            p99_ms=_percentile_ms(took, 0.99),
            problems=problems,
            probes=probes,
            probes_failed=failed,
        )


_OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]


async def _probe(node: Node, stop: asyncio.Event) -> tuple[int, int]:
    """Liveness probes of a kubelet: how many, and how many failed."""
    probes = failed = 0
    while not stop.is_set():
        probes += 1
        async with grpc.aio.insecure_channel(node.address, options=_OWN_CONNECTION) as channel:
            try:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=3)
            except grpc.aio.AioRpcError:
                failed += 1
        await asyncio.sleep(PROBE_EVERY_S)
    return probes, failed


@contextmanager
def _flooder(way: str, address: str, token: str) -> Iterator[None]:
    command = [
        sys.executable,
        "-m",
        "tests.support.flood.flooders",
        way,
        address,
        *([token] if token else []),
    ]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def token_entry(token: str, tenant: str) -> str:
    hashed = hashlib.sha256(token.encode()).hexdigest()
    rights = '["infer", "push", "operate"]'
    return f'[[tokens]]\nsha256 = "{hashed}"\ntenant = "{tenant}"\nrights = {rights}\n'


def _rss_mb(node: Node) -> int:
    status = Path(f"/proc/{node.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) // 1024


def _percentile_ms(took_s: Sequence[float], share: float) -> float:
    """Of sorted times; 0 without any."""
    return round(1000 * took_s[min(len(took_s) - 1, int(share * len(took_s)))], 1) if took_s else 0.0


async def run(
    cluster: Cluster, floods: Sequence[tuple[Sequence[str], str]], seconds: float, token: str = ""
) -> list[Seen]:
    """Each of `floods`, (ways, service), one after the other."""
    scene = Scene(cluster)
    await asyncio.to_thread(scene.start)
    return [await scene.flood(ways, service, seconds, token) for ways, service in floods]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.flood.run", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where results go")
    parser.add_argument("--seconds", type=float, default=30, help="of each way")
    parser.add_argument("--ways", nargs="+", choices=WAYS | TENANTS_WAYS)
    parser.add_argument("--services", nargs="+", default=["scheduler", "executor"])
    parser.add_argument("--tenant", action="store_true", help="who floods has a token, of the scheduler's")
    args = parser.parse_args()
    token, ways = (HOSTILE_TOKEN, TENANTS_WAYS) if args.tenant else ("", WAYS)
    results = Results(args.json, head("python -m tests.support.flood.run"))
    services = ["scheduler"] if args.tenant else args.services
    with tempfile.TemporaryDirectory() as folder:
        model = make_base(Path(folder) / "model", vocab_size=448, max_position_embeddings=4096)
        write_folder(model, byte_level())
        floods = [([way], service) for service in services for way in args.ways or ways]
        with Cluster(model, Path(folder)) as cluster:
            seen = asyncio.run(run(cluster, floods, args.seconds, token))
    for each in seen:
        results.add({**asdict(each), "faults": each.faults()})
    sys.exit(any(row["faults"] for row in results.rows))


if __name__ == "__main__":
    main()
