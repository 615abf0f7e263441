"""The whole scheduler as one object: `python -m scheduler` runs it, tests start it in their process."""

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor

import prometheus_client
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from adapter_store import ModelSpec, open_store
from lorafleet.doors import Door, Handlers, Health, PeerRates, paths
from lorafleet.doors.metrics_server import MetricsServer
from lorafleet.doors.settings import ConfigError
from lorafleet.ports import check_free
from lorafleet.tls.credentials import add_port, spoken
from lorafleet.tls.files import WatchedFiles
from lorafleet.tls.health_port import HealthPort
from lorafleet.v1 import (
    adapters_pb2,
    adapters_pb2_grpc,
    fleet_pb2,
    fleet_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
)
from scheduler.adapters.calls import MAX_TRANSFERS, Backends, Limits, held_listings
from scheduler.adapters.ingest import Ingest, PushLimits
from scheduler.adapters.pinning import Copies
from scheduler.adapters.retirement import Retirement
from scheduler.adapters.service import AdaptersService
from scheduler.adapters.spool import Spool
from scheduler.admission.admission import Admission
from scheduler.admission.auth import Authenticator
from scheduler.admission.constraints import Constraints
from scheduler.admission.json_web_tokens import JwtSettings
from scheduler.admission.quarantine import Quarantine
from scheduler.admission.versions import Versions
from scheduler.audit import Audit, AuditInterceptor
from scheduler.config import Config
from scheduler.dispatch.dispatcher import Dispatcher
from scheduler.dispatch.settings import DispatcherSettings
from scheduler.door import LIMITS, Doorkeeper
from scheduler.event_loop import measure_lag
from scheduler.fleet.demand import DemandMeter
from scheduler.fleet.demand_series import DemandCollector
from scheduler.fleet.discovery.discovery import Discovery
from scheduler.fleet.discovery.source import DiscoveryError
from scheduler.fleet.link import LinkSettings
from scheduler.fleet_service import FleetService
from scheduler.grpc_options import server_options
from scheduler.heartbeat import Heartbeat
from scheduler.inference_service import InferenceService
from scheduler.ledger.answer_id import AnswerIds
from scheduler.ledger.open import open_ledger
from scheduler.metrics import Metrics
from scheduler.pace import Pace
from scheduler.stream_writer import StreamWriter
from scheduler.tenants.exchange import Exchange
from scheduler.tenants.limits import TenantLimits
from scheduler.tenants.quotas import Quotas
from scheduler.tenants.sharing import Sharing
from scheduler.tenants.tenants import LOOK_S, Tenants
from scheduler.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_READY = (logging.INFO, "ready: executors take requests")
_NOT_READY = (
    logging.WARNING,
    "not ready: no executor takes requests, this scheduler drains, or cannot write its ledger",
)

SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["Inference"],
    adapters_pb2.DESCRIPTOR.services_by_name["Adapters"],
    fleet_pb2.DESCRIPTOR.services_by_name["Fleet"],
)
INFERENCE, ADAPTERS, FLEET = (service.full_name for service in SERVICES)
POOL_THREADS = 8
READINESS_POLL_S = 0.1
DEMAND_INTERVAL_S = 1.0


class CannotListen(Exception):
    """An address cannot be served on; the text names it."""


class Scheduler:
    """Made: everything is loaded and checked. Started: it listens. Stopped: nothing of it is left."""

    def __init__(self, config: Config) -> None:
        """On the event loop, which it blocks while it loads: nobody is served yet.

        Raises ConfigError, InvalidModel, InvalidTokenizer, InvalidFile, TlsError or StoreUnavailable.
        """
        self.config = config
        self.address = ""  # Where it listens, once started.
        self.metrics_port = -1
        self._registry = prometheus_client.CollectorRegistry()
        self._metrics = Metrics(self._registry, config.metric_names)
        prometheus_client.ProcessCollector(registry=self._registry)
        self._metrics_server: MetricsServer | None = None
        self.health_port = -1
        self._health_server: HealthPort | None = None
        self._ledger = open_ledger(config, self._metrics.ledger)
        self._spec = ModelSpec.from_folder(config.model)
        self._tokenizer = Tokenizer.from_folder(config.model)
        self._tls = WatchedFiles(config.tls) if config.tls else None
        self._authenticator = Authenticator(config.tokens_file, JwtSettings.of(config))
        self._tenants = Tenants(_default_limits(config), config.tenants_file)
        self._sharing = Sharing()
        self._store = open_store(config.store, allow_volatile=config.allow_volatile)
        self._pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="blocking")
        self._heartbeat = Heartbeat(self._metrics.loop_lag_seconds.observe)
        self._versions = Versions(
            self._store,
            config.alias_max_staleness,
            count=self._metrics.resolved,
            awake=self._heartbeat.awake,
        )
        self._quarantine = Quarantine(self._store, self._versions, self._pool, self._metrics.data_loss)
        link_settings = _link_settings(config, self._spec)
        self._follow_certificates(link_settings.tls)
        self.dispatcher = Dispatcher(
            DispatcherSettings.of(config),
            link_settings,
            self._tokenizer,
            self._metrics,
            time.monotonic,
            self._quarantine.suspect,
            self._heartbeat.awake,
            self._tenants,
            Quotas(self._tenants.limits, self._sharing.share),
        )
        self._discovery = self._discovery_of(config)
        self._demand = DemandMeter(config.scale_seats_filled, config.scale_start_within)
        self._registry.register(DemandCollector(lambda: self._demand.last))
        self._exchange = Exchange(self._store, self._sharing, self._pool, time.monotonic)
        self._retirement = Retirement(
            self._store,
            self._versions,
            self.dispatcher,
            self._pool,
            time.monotonic,
            self._metrics.version_gone,
            self._metrics.served_versions,
        )
        self._pace = Pace(config.stream_interval_ms / 1000)
        self._writer = StreamWriter(self._pace, config.slow_client_timeout, self._metrics)
        self._metrics.store_age_seconds.set_function(lambda: self._versions.age_s)
        self._metrics.store_refuses_changes.set_function(lambda: bool(self._store.problem()))
        self._metrics.known_names.set_function(lambda: len(self._versions))
        self._metrics.missing_pins.follow(self.dispatcher.fleet.missing_pins)
        self._admission = Admission(
            self._versions,
            self._tokenizer,
            self._spec,
            self._max_model_len,
            self._pool,
            config.max_admitting,
            constraints=Constraints(config.model, self._spec.vocab_size, self._tokenizer.eos_token_ids),
            max_template_calls=self._tenants.each("max_template_calls"),
        )
        push_limits = PushLimits(config.max_adapter_rank or None, config.max_versions_per_tenant or None)
        self._ingest = Ingest(
            config.store,
            self._admission.templates,
            allow_volatile=config.allow_volatile,
            limits=push_limits,
        )
        try:
            share = self._tenants.each("max_spool_bytes")
            self._spool = Spool(config.spool, config.max_spool_bytes, share, MAX_TRANSFERS)
        except OSError as error:
            raise ConfigError(f"spool: {error}") from error
        self._health = Health()
        audit = Audit(_methods(), self._metrics.refused)
        options = server_options(
            config.keepalive_time, config.max_streams_per_connection, config.max_connections
        )
        self._server = paths.make_server(options, [AuditInterceptor(audit)])
        self._add_services()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Raises CannotListen, StoreUnavailable."""
        self._heartbeat.start()
        self._set_readiness(False)
        await self._retirement.start()
        await self._exchange.start()
        await self._listen()
        self._versions.start()
        self._discovery.start()
        self._ledger.start()
        self.dispatcher.start()
        self._tasks = [
            asyncio.create_task(self._follow_readiness(), name="readiness"),
            asyncio.create_task(self._follow_demand(), name="demand"),
            asyncio.create_task(self._follow_tenants(), name="tenants"),
            asyncio.create_task(measure_lag(self._pace.adapt, self.dispatcher.line.waited_s), name="lag"),
        ]

    async def drain(self) -> bool:
        """Refuses new requests at once and lets accepted ones end, and their clients read what they are owed.
        Whether all did within --drain-timeout."""
        self.dispatcher.draining = True
        self._set_readiness(False)
        logger.info("draining: %d requests are live", self.dispatcher.num_live)
        give_up = time.monotonic() + self.config.drain_timeout
        ended = await self.dispatcher.drain(self.config.drain_timeout)
        return await self._writer.drain(max(0.0, give_up - time.monotonic())) and ended

    async def stop(self) -> None:
        """Ends what is still live with UNAVAILABLE."""
        for task in self._tasks:
            task.cancel()
        await self._discovery.stop()
        await self.dispatcher.stop()
        await self._exchange.stop()
        await self._retirement.stop()
        self._versions.stop()
        await self._server.stop(grace=1.0)
        await self._ledger.stop()
        if self._health_server:
            await self._health_server.stop()
        await self._admission.close()
        self._heartbeat.stop()
        await asyncio.to_thread(self._ingest.close)
        self._pool.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._spool.close)
        if self._metrics_server:
            await asyncio.to_thread(self._metrics_server.close)

    def _discovery_of(self, config: Config) -> Discovery:
        fleet, failed = self.dispatcher.fleet, self._metrics.discovery_failed
        try:
            discovery = Discovery(config.executor, config.discovery_interval, fleet.settle, failed)
        except DiscoveryError as error:
            raise ConfigError(f"executor: {error}") from error
        self._metrics.follow_discovery(discovery.flags)
        return discovery

    def _add_services(self) -> None:
        doorkeeper = Doorkeeper(self._authenticator, self._metrics.refused_at_door)
        rates, each = PeerRates(self.config.max_peer_calls), self._tenants.each
        door = Door(doorkeeper, LIMITS, rates, body_share=each("max_heavy_bytes"))
        handlers = Handlers(self._server, door)
        listings = held_listings(each("max_listings"))
        inference_pb2_grpc.add_InferenceServicer_to_server(
            InferenceService(
                self._admission,
                self.dispatcher,
                self._writer,
                self._ledger,
                AnswerIds(self._store.secret()),
                self._store,
                self._spec,
                self._metrics,
                self._pool,
                listings,
            ),
            handlers,
        )
        backends = Backends(
            self._store,
            self._spec,
            self._ingest,
            self._versions,
            Copies(self.dispatcher.fleet),
            self._retirement,
            self._pool,
            self._quarantine,
            self._spool,
            listings,
            self._heartbeat.awake,
        )
        limits = Limits(
            max_push_bytes=self.config.max_push_bytes,
            tenant_transfers=each("max_transfers"),
            delete_grace_s=self.config.delete_grace,
        )
        adapters = AdaptersService(backends, limits)
        adapters_pb2_grpc.add_AdaptersServicer_to_server(adapters, handlers)
        fleet = FleetService(self.dispatcher, each("max_watches"))
        fleet_pb2_grpc.add_FleetServicer_to_server(fleet, handlers)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, handlers)
        names = [INFERENCE, ADAPTERS, FLEET, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
            reflection.aio.ReflectionServicer(names), handlers
        )

    async def _listen(self) -> None:
        host, _, port = self.config.listen.rpartition(":")
        _check_free(host.strip("[]"), int(port))
        try:
            self.address = f"{host}:{add_port(self._server, self.config.listen, self._tls)}"
        except RuntimeError as error:
            raise CannotListen(f"cannot listen on {self.config.listen}: {error}") from error
        if self.config.metrics_port >= 0:
            self._start_metrics(self.config.metrics_host or host.strip("[]"), self.config.metrics_port)
        if self.config.health_port >= 0:
            await self._start_health(host, self.config.health_port)
        await self._server.start()
        if self.config.insecure:
            logger.warning("--insecure: %s", self.config.open_door or "nothing needs it here")
        if self.config.executor_tls is None and self.config.far_executors:
            logger.warning(
                "executors are reached in clear, set --executor-ca-file: %s",
                ", ".join(self.config.far_executors),
            )
        logger.info("listening on %s, %s", self.address, spoken(self._tls), extra={"address": self.address})

    async def _start_health(self, host: str, port: int) -> None:
        _check_free(host.strip("[]"), port)
        try:
            self._health_server = HealthPort(self._health, host, port)
        except RuntimeError as error:
            raise CannotListen(f"cannot serve health on {host}:{port}: {error}") from error
        self.health_port = self._health_server.port
        await self._health_server.start()
        logger.info("health on %s:%d", host, self.health_port)

    def _start_metrics(self, host: str, port: int) -> None:
        try:
            self._metrics_server = MetricsServer(host, port, self._registry)
        except OSError as error:
            raise CannotListen(f"cannot serve metrics on {host}:{port}: {error.strerror}") from error
        self.metrics_port = self._metrics_server.port
        logger.info("metrics on http://%s:%d/metrics", host, self.metrics_port)

    def _follow_certificates(self, towards_executors: WatchedFiles | None) -> None:
        own, other = ("tls-cert-file", "tls-client-ca-file"), ("executor-cert-file", "executor-ca-file")
        for files, (cert, ca) in ((self._tls, own), (towards_executors, other)):
            for file, end in files.expiries(cert, ca) if files else ():
                self._metrics.follow_certificate(file, end)

    def _max_model_len(self) -> int:
        known = [state.limits.max_model_len for state in self.dispatcher.fleet.states if state.limits]
        return min([self._spec.max_model_len, *known])

    async def _follow_readiness(self) -> None:
        told = False
        while True:
            takes = self._ledger.writable and not self.dispatcher.draining
            ready = self.dispatcher.fleet.any_ready and takes
            self._set_readiness(ready)
            if ready != told:
                told = ready
                logger.log(*(_READY if ready else _NOT_READY))
            await asyncio.sleep(READINESS_POLL_S)

    async def _follow_demand(self) -> None:
        queue, fleet = self.dispatcher.queue, self.dispatcher.fleet
        while True:
            cold = sum(bool(digest) and not fleet.index.claims(digest) for digest in queue.digests())
            self._demand.look(time.monotonic(), fleet.states, len(queue), cold)
            await asyncio.sleep(DEMAND_INTERVAL_S)

    async def _follow_tenants(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._tenants.look()

    def _set_readiness(self, ready: bool) -> None:
        """Liveness, "", is that this loop answers at all."""
        status = health_pb2.HealthCheckResponse
        self._health.set(health.OVERALL_HEALTH, status.SERVING)
        self._health.set(INFERENCE, status.SERVING if ready else status.NOT_SERVING)


def _check_free(host: str, port: int) -> None:
    """Raises CannotListen."""
    try:
        check_free(host, port)
    except OSError as error:
        raise CannotListen(f"cannot listen on {host}:{port}: {error.strerror}") from error


def _methods() -> list[str]:
    """The methods as calls name them."""
    return [f"/{service.full_name}/{method.name}" for service in SERVICES for method in service.methods]


def _default_limits(config: Config) -> TenantLimits:
    return TenantLimits(
        max_queued=config.max_queued_per_tenant,
        max_spool_bytes=max(config.max_spool_bytes // 2, config.max_push_bytes),
    )


def _link_settings(config: Config, spec: ModelSpec) -> LinkSettings:
    return LinkSettings(
        spec.fingerprint,
        report_timeout_s=config.report_timeout,
        step_timeout_s=config.step_timeout,
        tls=WatchedFiles(config.executor_tls) if config.executor_tls else None,
    )
