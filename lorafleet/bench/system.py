"""What is measured: a scheduler that runs, services started here, or an engine alone."""

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from lorafleet.bench.engine_caller import Digests, running_engine
from lorafleet.bench.errors import BenchError
from lorafleet.bench.play import Caller
from lorafleet.bench.scheduler_caller import SchedulerCaller
from lorafleet.bench.session import Session
from lorafleet.bench.workload import Names
from lorafleet.local import LocalConfig, LocalFleet
from lorafleet.tls.files import Tls

DEFAULT_VOCAB_SIZE = 32000
_QUIET = ("--log-level", "warning")  # a line for each request would be in the way


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemConfig:
    """kind: "target", "local" or "in-process". `model` and `store` are needed for the latter two."""

    kind: str
    target: str = ""
    token: str | None = None
    tls: Tls | None = None
    timeout: float | None = None
    metrics_urls: tuple[str, ...] = ()
    model: Path | None = None
    store: str = ""
    executor_args: tuple[str, ...] = ()
    scheduler_args: tuple[str, ...] = ()
    ready_timeout: float = 600.0
    vocab_size: int = 0
    adapter_prefix: str = "bench-"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind != "target" and not (self.model and self.store):
            raise BenchError(f"--{self.kind} needs --model and --store")


@dataclass(frozen=True, slots=True)
class Started:
    """Where requests go, and how long it took until they could (None: it ran already)."""

    config: SystemConfig
    ready_s: float | None = None


@contextmanager
def started(config: SystemConfig, note: Callable[[str], None]) -> Iterator[Started]:
    """The system: with kind "local", scheduler and executor run until it is left; otherwise nothing is
    started here.

    Raises LaunchError.
    """
    if config.kind != "local" or config.model is None:
        yield Started(config)
        return
    local = LocalConfig(
        config.model,
        config.store,
        port=0,
        metrics_port=0,
        scheduler_args=(*_QUIET, *config.scheduler_args),
        executor_args=(*_QUIET, *config.executor_args),
    )
    begin = time.monotonic()
    with LocalFleet(local, lambda service, line: note(f"[{service}] {line}")) as fleet:
        fleet.wait_ready(config.ready_timeout)
        ready_s = time.monotonic() - begin
        urls = (*fleet.executor_metrics, fleet.scheduler_metrics)
        yield Started(replace(config, target=fleet.target, metrics_urls=urls), ready_s)


@asynccontextmanager
async def session(
    system: Started, note: Callable[[str], None]
) -> AsyncIterator[tuple[Session, float | None]]:
    """A session on it, and the seconds until it was ready, if it was started here. Raises BenchError."""
    config = system.config
    names = Names(config.vocab_size or _vocab_size(config.model), config.adapter_prefix)
    if config.kind == "in-process":
        arguments = ("--model", str(config.model), "--store", config.store, *_QUIET, *config.executor_args)
        begin = time.monotonic()
        async with running_engine(
            arguments, _digests(config.store), lambda line: note(f"[engine] {line}")
        ) as caller:
            ready_s = time.monotonic() - begin
            yield Session(caller, names, config.seed, note, caller.drop), ready_s
        return
    async with _connected(config) as caller:
        yield Session(caller, names, config.seed, note), system.ready_s


@asynccontextmanager
async def _connected(config: SystemConfig) -> AsyncIterator[Caller]:
    caller = SchedulerCaller(
        config.target,
        token=config.token,
        tls=config.tls,
        timeout=config.timeout,
        metrics_urls=config.metrics_urls,
    )
    try:
        await caller.check()
        yield caller
    finally:
        await caller.close()


def _vocab_size(model: Path | None) -> int:
    if model is None:
        return DEFAULT_VOCAB_SIZE
    try:
        config: Mapping[str, object] = json.loads((model / "config.json").read_text(encoding="utf-8"))
        return int(str(config["vocab_size"]))
    except (OSError, ValueError, KeyError) as error:
        raise BenchError(f"{model / 'config.json'} does not tell vocab_size: {error}") from error


def _digests(store_url: str) -> Digests:
    try:
        from adapter_store import AdapterStoreError, Ref, open_store
    except ModuleNotFoundError as error:
        raise BenchError(
            f"--in-process needs the package {error.name}: pip install 'lorafleet[executor]'"
        ) from error
    try:
        store = open_store(store_url)
    except AdapterStoreError as error:
        raise BenchError(str(error)) from error

    @cache
    def digest(ref: str) -> str:
        try:
            return store.resolve(Ref.parse(ref, "default")).digest
        except AdapterStoreError as error:
            raise BenchError(f"adapter {ref}: {error}; `lorafleet bench make-adapters` makes them") from error

    return digest
