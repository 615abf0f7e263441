"""The life of the executor's process: it comes up, gets ready, watches, drains and ends."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
)

from adapter_store import CachedStore, WeightsSource
from executor.adapters.disk_tier import DiskTier
from executor.config import ExecutorConfig
from executor.door import LIMITS, Doorkeeper
from executor.engine_thread import EngineThread
from executor.errors import RankLost, StartError
from executor.events import EngineInfo
from executor.hub import Hub
from executor.metrics import Metrics, StateCollector
from executor.server import ExecutorServicer, HealthBoard, make_health_port, make_server
from lorafleet.doors import Door
from lorafleet.doors.metrics_server import MetricsServer
from lorafleet.tls.credentials import spoken
from lorafleet.tls.files import TlsError, WatchedFiles
from lorafleet.tls.health_port import HealthPort

if TYPE_CHECKING:
    from executor.engine import Engine

WATCH_INTERVAL_S = 0.25
LOAD_INTERVAL_S = 0.75  # schedulers expect a load each second
STOP_GRACE_S = 5.0

T = TypeVar("T")

logger = logging.getLogger(__name__)


class ExecutorApp:
    """The server is up (alive, not ready) after entering; the model is loaded beside it.

    `async with ExecutorApp(config, store, build_engine) as app: await app.wait()`. Entering raises StartError
    when a port is taken. All methods belong to the event loop. The engine is built by `build`, with the
    arguments of `executor.build.build_engine`.
    """

    def __init__(self, config: ExecutorConfig, store: WeightsSource, build: "Callable[..., Engine]") -> None:
        registry = CollectorRegistry()
        metrics = Metrics(registry)
        self._config = config
        self._registry = registry
        self._engine = EngineThread(
            build=lambda wake: build(
                config,
                store,
                metrics=metrics,
                wake=wake,
                lost=lambda error: self._later(self._on_end, error),
                discard_copy=self._disk.discard if self._disk else None,
            ),
            on_ready=lambda info: self._later(self._on_ready, info),
            on_events=lambda events: self._later(self.hub.take, events),
            on_end=lambda error: self._later(self._on_end, error),
        )
        self._disk: DiskTier | None = None
        if isinstance(store, CachedStore):
            self._disk = DiskTier(
                store,
                lambda copies: self._engine.submit(lambda engine: engine.on_disk(copies)),
                lambda digest: self._engine.submit(lambda engine: engine.discarded(digest)),
            )
        self.hub = Hub(self._engine, config.outbox_messages)
        registry.register(StateCollector(self.hub.snapshot, time.time))
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)
        self._servicer = ExecutorServicer(self.hub)
        self._board = HealthBoard()
        self._tls = _watched(config)
        if self._tls:
            for file, end in self._tls.expiries("tls-cert-file", "tls-client-ca-file"):
                metrics.follow_certificate(file, end)
        self._health: HealthPort | None = None
        self._door = Door(Doorkeeper(metrics.refused_at_door), LIMITS)
        self._draining = False
        self.ready = asyncio.Event()
        self.port = 0
        self.metrics_port = 0
        self.health_port = -1

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[Exception | None] = self._loop.create_future()
        self._metrics_server = self._start_metrics()
        try:
            self._server, self.port = make_server(
                self._config.listen,
                self._servicer,
                self._board,
                self._door,
                keepalive_time_s=self._config.keepalive_time,
                max_connections=self._config.max_connections,
                tls=self._tls,
            )
            self._tell_health()
            await self._start_health()
            await self._server.start()
        except BaseException:
            self._stop_metrics()
            raise
        self._watcher = self._start_task(self._watch())
        self._engine.start()
        if self._disk:
            self._disk.start()
        if self._config.insecure:
            logger.warning("--insecure: %s", self._config.open_door or "nothing needs it here")
        logger.info(
            "listening on %s:%d, %s, loading the model", self._config.host, self.port, spoken(self._tls)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        await self._server.stop(STOP_GRACE_S)
        if self._health:
            await self._health.stop()
        self._engine.stop()
        if self._disk:
            self._disk.close()
        await asyncio.to_thread(self._engine.join, STOP_GRACE_S)
        self._stop_metrics()

    async def wait(self) -> None:
        """Until the drain is done. Raises what ended the engine: StartError and the like, or a bug."""
        error = await asyncio.shield(self._ended)
        if error is not None:
            raise error

    def drain(self) -> None:
        """Take nothing new, let accepted work finish within drain_timeout, hand back the rest, then end."""
        if not self._draining:
            self._draining = True
            logger.info("draining: %d dispatches go on", self.hub.num_live)
            self._drainer = self._start_task(self._drain())

    async def _drain(self) -> None:
        self._tell_health()
        self._engine.submit(lambda engine: engine.drain())
        deadline = time.monotonic() + self._config.drain_timeout
        while self.hub.num_live and time.monotonic() < deadline:
            await asyncio.sleep(WATCH_INTERVAL_S / 5)
        logger.info("drained: %d dispatches are handed back", self.hub.num_live)
        self.hub.hand_back()
        self._finish(None)

    async def _watch(self) -> None:
        next_load = 0.0
        while True:
            now = time.monotonic()
            if now >= next_load:
                next_load = now + LOAD_INTERVAL_S
                self.hub.tell_loads()
            self.hub.cut_off_overdue(now, self._config.outbox_timeout)
            self.hub.lapse_waits()
            self._tell_health()
            self._end_if_a_rank_hangs()
            await asyncio.sleep(WATCH_INTERVAL_S)

    def _end_if_a_rank_hangs(self) -> None:
        """A collective may wait for ever, and nothing but a new group of processes helps then."""
        if self._config.tensor_parallel_size > 1 and self._stalls:
            self._on_end(RankLost(f"a step has made no progress for {self._config.step_timeout:g} s"))

    @property
    def _stalls(self) -> bool:
        return self._engine.stalled_s >= self._config.step_timeout

    def _tell_health(self) -> None:
        alive = not self._stalls
        self._board.set(
            alive=alive, ready=self.ready.is_set() and not self.hub.draining and not self._draining
        )

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Nothing here can do without the others: a failure ends the process, and `wait` raises it."""

        def ended(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if isinstance(error, Exception):
                self._finish(error)

        task = asyncio.create_task(work)
        task.add_done_callback(ended)
        return task

    def _later(self, function: Callable[[T], None], argument: T) -> None:
        """From the engine's thread. After the loop's end there is nobody to tell."""

        def call() -> None:
            try:
                function(argument)
            except Exception as error:  # Tokens or ends that are lost here would never be told.
                self._finish(error)

        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            logger.debug("the event loop is closed")

    def _on_ready(self, info: EngineInfo) -> None:
        self.hub.ready(info)
        self.ready.set()
        logger.info("ready")

    def _on_end(self, error: Exception | None) -> None:
        self.ready.clear()
        self.hub.end_streams(engine_lost=error is not None)
        self._finish(error)

    def _finish(self, error: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(error)

    async def _start_health(self) -> None:
        if self._config.health_port >= 0:
            self._health = make_health_port(self._board, self._config.host, self._config.health_port)
            self.health_port = self._health.port
            await self._health.start()
            logger.info("health on %s:%d", self._config.host, self.health_port)

    def _start_metrics(self) -> MetricsServer | None:
        if self._config.metrics_port < 0:
            return None
        host = self._config.metrics_host or self._config.host.strip("[]")
        try:
            server = MetricsServer(host, self._config.metrics_port, self._registry)
        except OSError as error:
            raise StartError(
                f"cannot serve metrics on {host}:{self._config.metrics_port}: {error.strerror or error}"
            ) from error
        self.metrics_port = server.port
        logger.info("metrics on http://%s:%d/metrics", host, self.metrics_port)
        return server

    def _stop_metrics(self) -> None:
        if self._metrics_server is not None:
            self._metrics_server.close()


def _watched(config: ExecutorConfig) -> WatchedFiles | None:
    """Raises StartError."""
    try:
        return WatchedFiles(config.tls) if config.tls else None
    except TlsError as error:
        raise StartError(f"TLS: {error}") from error
