"""Settings of the scheduler, and what fits together of them."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lorafleet.doors.logs import FORMATS, LEVELS
from lorafleet.doors.options import MAX_CONNECTIONS, MAX_STREAMS
from lorafleet.doors.settings import REQUIRED, ConfigError, load, setting
from lorafleet.tls.files import Tls
from lorafleet.tls.listening import is_loopback, unmatched_pair, unmet_beyond_loopback
from scheduler.fleet.discovery.flags import host_and_port, parse
from scheduler.fleet.endpoint import Endpoint


@dataclass(frozen=True, slots=True)
class Config:
    """Checked when made: raises ConfigError. Times are in seconds."""

    model: Path = setting(
        REQUIRED, "folder of the base model: config.json, tokenizer.json, safetensors", "FOLDER"
    )
    store: str = setting(
        REQUIRED, "adapter store: a folder, disk:<folder>, redis://... or rediss://...", "STORE"
    )
    executor: tuple[str, ...] = setting(
        REQUIRED,
        "where executors are: host:port; dns:///name:port or dns://server:port/name:port, all that the "
        "name has in DNS, by names of their own where it has SRV records (_grpc._tcp.name); file:path, "
        "one a line, host:port and a name if it has one; repeat it for more",
        "WHERE",
        repeats=True,
    )
    discovery_interval: float = setting(
        5.0, "seconds after which names and files are asked again for executors"
    )
    allow_volatile: bool = setting(
        False, "take a Redis that may lose in a crash what it acknowledged: true or false"
    )
    listen: str = setting(
        "127.0.0.1:50051", "host:port to serve gRPC on; port 0 is any free one", "HOST:PORT"
    )
    metrics_port: int = setting(9400, "port of Prometheus metrics; 0 is any free one, -1 none")
    metrics_host: str = setting(
        "", "address for the metrics; by default the one that gRPC is served on", "HOST"
    )
    health_port: int = setting(
        -1,
        "port on the same host that serves grpc.health.v1 in clear and nothing else, for probes that "
        "speak no TLS; 0 is any free one, -1 none",
    )
    max_connections: int = setting(
        MAX_CONNECTIONS, "connections in all; more are closed as soon as they are made"
    )
    max_streams_per_connection: int = setting(
        MAX_STREAMS,
        "calls at once on one connection; clients of gRPC wait with more, or open another as ours do",
    )
    max_peer_calls: float = setting(
        0.0,
        "calls a second that one address may make, known or not; more are refused. 0 is any number: "
        "behind a proxy all callers have one address",
        "CALLS",
    )
    tls_cert_file: Path | None = setting(
        None, "certificate to serve TLS with, in PEM form; TLS files are read again when they change", "FILE"
    )
    tls_key_file: Path | None = setting(None, "its key", "FILE")
    tls_client_ca_file: Path | None = setting(
        None, "CA of which every client must have a certificate: mutual TLS", "FILE"
    )
    executor_ca_file: Path | None = setting(
        None, "CA of the executors: they are reached over TLS, never in clear", "FILE"
    )
    executor_cert_file: Path | None = setting(
        None, "certificate that executors are shown: mutual TLS", "FILE"
    )
    executor_key_file: Path | None = setting(None, "its key", "FILE")
    insecure: bool = setting(
        False, "listen beyond loopback without TLS or tokens, where a proxy or mesh does it: true or false"
    )
    tokens_file: Path | None = setting(
        None,
        "TOML file of bearer tokens and certificates; without it or jwt, only loopback is served",
        "FILE",
    )
    jwt_issuer: str = setting("", "whose JSON web tokens are taken: their claim iss", "URL")
    jwt_audience: str = setting("", "what their claim aud must have", "TEXT")
    jwt_keys_file: Path | None = setting(
        None, "JWK set of the public keys that sign them; read again when it changes", "FILE"
    )
    jwt_tenant_claim: str = setting("tenant", "claim that names the tenant; dots go into objects", "CLAIM")
    jwt_rights_claim: str = setting("rights", "claim with the rights: a list, or words in one text", "CLAIM")
    jwt_rights_prefix: str = setting(
        "", "what rights begin with in that claim; other values there are left alone", "TEXT"
    )
    jwt_adapters_claim: str = setting(
        "adapters", "claim with the patterns; without it, all of the tenant's own are seen", "CLAIM"
    )
    tenants_file: Path | None = setting(
        None,
        "TOML file of what tenants may take: rates, requests at once, weights; read again on a change",
        "FILE",
    )
    max_queued: int = setting(1024, "requests that may wait, in all")
    max_queued_per_tenant: int = setting(
        512, "requests of one tenant that may wait, where tenants_file does not say"
    )
    max_admitting: int = setting(1024, "requests that may be under check before they wait; more are refused")
    queue_timeout: float = setting(
        30.0, "seconds that a request waits while no executor is ready, and not cordoned, that can run it"
    )
    max_queue_time: float = setting(
        0.0,
        "seconds that a request without a deadline may be expected to wait before it starts; with more "
        "it is refused at once. 0 is any wait. One with a deadline is refused when it cannot make that",
    )
    aging: float = setting(2.0, "seconds that a version is passed over before a slot is freed for it")
    priority_aging: float = setting(
        5.0,
        "seconds of waiting that raise a request's priority by one, up to the highest that its tenant "
        "has waiting; 0 is never",
    )
    prompt_token_price: float = setting(
        0.5, "what a prompt token counts in its tenant's share; a generated one counts 1", "PRICE"
    )
    reserve_seats: int = setting(
        4,
        "seats of an executor, an eighth of them at most, that are only for tenants that have fewer than "
        "so many running there; none without tokens_file",
    )
    slow_start: float = setting(
        10.0, "seconds in which an executor that joins others at work gets more and more seats; 0 is none"
    )
    circuit_failures: int = setting(
        5, "failed attempts, of the last twice as many, that close an executor for a while; 0 is never"
    )
    max_attempts: int = setting(3, "failed attempts in a row, none with a new token, that fail a request")
    scale_seats_filled: float = setting(
        0.8,
        "share of an executor's seats that should be in use, for lorafleet_scheduler_wanted_executors",
        "SHARE",
    )
    scale_start_within: float = setting(
        30.0, "seconds within which what waits should have started, for the same"
    )
    slow_client_timeout: float = setting(
        10.0, "seconds that a write may wait for a client that does not read"
    )
    keepalive_time: float = setting(
        20.0,
        "seconds of silence after which a client is pinged; one that does not answer for half as long is "
        "gone, with its requests",
    )
    stream_interval_ms: int = setting(
        0, "shortest time between chunks of a stream, which gather the tokens of that time"
    )
    report_timeout: float = setting(3.0, "seconds without a report that make an executor hung")
    step_timeout: float = setting(60.0, "seconds of one step that make an executor hung")
    alias_max_staleness: float = setting(
        1.0, "seconds after which an alias that the store has not confirmed is UNAVAILABLE"
    )
    max_push_bytes: int = setting(8 << 30, "bytes of a pushed folder")
    spool: Path | None = setting(
        None,
        "folder for what is pushed or pulled until it is through, by default that of temporary files",
        "FOLDER",
    )
    max_spool_bytes: int = setting(
        16 << 30, "bytes there of all pushes and pulls under way; half, or one push, is one tenant's"
    )
    max_adapter_rank: int = setting(0, "highest rank that a pushed adapter may have; 0 is any")
    max_versions_per_tenant: int = setting(0, "versions that a tenant may have in the store; 0 is any number")
    delete_grace: float = setting(
        60.0, "seconds for which deleted adapters stay readable at least; keep it above 40"
    )
    drain_timeout: float = setting(30.0, "seconds that accepted requests get to end after SIGTERM")
    ledger_dir: Path | None = setting(
        None, "folder for the usage ledger, one record an answer; without it none is kept", "FOLDER"
    )
    ledger_keep: float = setting(7.0, "days that files of the ledger stay after a Redis has them", "DAYS")
    ledger_stream_days: int = setting(
        62, "days that a Redis keeps records of the ledger; 0 is for ever", "DAYS"
    )
    metric_names: int = setting(100, "tenants, and adapters, with a label of their own; the rest share one")
    log_format: str = setting("text", f"one of {', '.join(FORMATS)}")
    log_level: str = setting("info", f"one of {', '.join(LEVELS)}")

    def __post_init__(self) -> None:
        try:
            places = [parse(flag) for flag in self.executor]
        except ValueError as error:
            raise ConfigError(f"executor: {error}") from error
        if not places:
            raise ConfigError("executor: name at least one host:port")
        if len(set(places)) < len(places):
            raise ConfigError("executor: an address is named twice")
        _split_address(self.listen, "listen")
        jwt_settings = (self.jwt_issuer, self.jwt_audience, self.jwt_keys_file)
        if any(jwt_settings) and not all(jwt_settings):
            raise ConfigError("jwt_issuer, jwt_audience, jwt_keys_file: set all of them, or none")
        self._check_tls()
        for name in ("metrics_port", "health_port"):
            if not -1 <= getattr(self, name) <= 65535:
                raise ConfigError(f"{name}: {getattr(self, name)} is not in [-1, 65535]")
        for name in (
            "max_queued",
            "max_queued_per_tenant",
            "max_admitting",
            "max_connections",
            "max_streams_per_connection",
            "max_attempts",
            "max_push_bytes",
            "max_spool_bytes",
            "slow_client_timeout",
            "keepalive_time",
            "alias_max_staleness",
            "report_timeout",
            "step_timeout",
            "discovery_interval",
            "scale_seats_filled",
            "scale_start_within",
        ):
            if not getattr(self, name) > 0:  # NaN is not, either.
                raise ConfigError(f"{name}: must be above 0")
        for name in (
            "queue_timeout",
            "slow_start",
            "circuit_failures",
            "max_queue_time",
            "aging",
            "priority_aging",
            "prompt_token_price",
            "max_peer_calls",
            "reserve_seats",
            "stream_interval_ms",
            "delete_grace",
            "max_adapter_rank",
            "max_versions_per_tenant",
            "drain_timeout",
            "ledger_keep",
            "ledger_stream_days",
            "metric_names",
        ):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}: must not be negative")
        if self.max_push_bytes > self.max_spool_bytes:
            raise ConfigError("max_spool_bytes: must not be below max_push_bytes")
        if self.scale_seats_filled > 1:
            raise ConfigError("scale_seats_filled: must not be above 1")
        if self.log_format not in FORMATS:
            raise ConfigError(f"log_format: {self.log_format!r} is not one of {', '.join(FORMATS)}")
        if self.log_level not in LEVELS:
            raise ConfigError(f"log_level: {self.log_level!r} is not one of {', '.join(LEVELS)}")

    @property
    def tls(self) -> Tls | None:
        """What the server has."""
        cert, key = self.tls_cert_file, self.tls_key_file
        return Tls(ca=self.tls_client_ca_file, cert=cert, key=key) if cert else None

    @property
    def executor_tls(self) -> Tls | None:
        """What executors are reached with."""
        ca = self.executor_ca_file
        return Tls(ca=ca, cert=self.executor_cert_file, key=self.executor_key_file) if ca else None

    @property
    def open_door(self) -> str:
        """What is missing for those who can reach `listen` from outside, and what to do; or ""."""
        wanted = {
            "--tokens-file or --jwt-keys-file": self.tells_callers_apart,
            "--tls-cert-file": self.tls_cert_file,
            "--tls-key-file": self.tls_key_file,
        }
        return unmet_beyond_loopback(self.listen.rpartition(":")[0], wanted)

    @property
    def far_executors(self) -> list[str]:
        """Where executors are beyond loopback, or may be."""
        places = [(flag, parse(flag)) for flag in self.executor]
        return [
            flag
            for flag, place in places
            if not isinstance(place, Endpoint) or not is_loopback(host_and_port(place.address)[0])
        ]

    def _check_tls(self) -> None:
        for prefix in ("tls", "executor"):
            cert, key = getattr(self, f"{prefix}_cert_file"), getattr(self, f"{prefix}_key_file")
            if problem := unmatched_pair(f"--{prefix}-cert-file", cert, f"--{prefix}-key-file", key):
                raise ConfigError(problem)
        if self.tls_client_ca_file and not self.tls_cert_file:
            raise ConfigError("--tls-client-ca-file: needs --tls-cert-file and --tls-key-file")
        if self.executor_cert_file and not self.executor_ca_file:
            raise ConfigError("--executor-cert-file: needs --executor-ca-file")
        if self.open_door and not self.insecure:
            raise ConfigError(self.open_door)

    @property
    def tells_callers_apart(self) -> bool:
        """Whether callers must say who they are."""
        return self.tokens_file is not None or self.jwt_keys_file is not None


def load_config(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Config:
    about = "Takes requests over gRPC, groups them by adapter and sends them to executors."
    return load(Config, "scheduler", about, arguments, environment)


def _split_address(address: str, name: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{name}: {address!r} is not host:port")
    return host, int(port)
