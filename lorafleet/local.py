"""A whole LoraFleet on one machine, as real processes: a scheduler, executors, a store in a folder."""

import queue
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lorafleet.errors import LaunchError, ServiceEnded
from lorafleet.ports import free_port, hold_port
from lorafleet.service import LogLine, Service

_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class LocalConfig:
    """model: a Hugging Face folder. store: the adapters' folder, made when missing, or a store's url.

    port, metrics_port: the scheduler's on `host`; executor n has metrics_port + 1 + n, and a free port for
    gRPC. 0 picks free ones. scheduler_args, executor_args: more arguments for the services' command lines.
    """

    model: Path
    store: Path | str
    host: str = "127.0.0.1"
    port: int = 50051
    metrics_port: int = 9400
    executors: int = 1
    scheduler_args: tuple[str, ...] = ()
    executor_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (self.model / "config.json").is_file():
            raise LaunchError(f"{self.model} is no model folder: it has no config.json")
        if self.executors < 1:
            raise LaunchError(f"there must be at least one executor, not {self.executors}")


class LocalFleet:
    """Starts the services on entering, stops them on leaving: the scheduler first, to finish accepted work.

    with LocalFleet(LocalConfig(model, store), log) as fleet:
        fleet.wait_ready(120)
        Client(fleet.target) ...

    They end, too, when this process dies. Raises LaunchError; ServiceEnded when one ends by itself.
    """

    def __init__(self, config: LocalConfig, log: LogLine) -> None:
        self._reserved = ExitStack()  # ports
        ports = _choose_ports(config, self._reserved)
        self._store = str(config.store)
        self.target = f"{_reachable(config.host)}:{ports.scheduler}"
        self.scheduler_metrics = f"http://{_reachable(config.host)}:{ports.scheduler_metrics}/metrics"
        self.executor_metrics = tuple(f"http://127.0.0.1:{port}/metrics" for port in ports.executor_metrics)
        self._exits: queue.SimpleQueue[Service] = queue.SimpleQueue()
        self._executors = [
            Service(f"executor-{index}", "executor", arguments, f"127.0.0.1:{port}", log, self._exits)
            for index, (port, arguments) in enumerate(_executor_commands(config, ports))
        ]
        arguments = _scheduler_command(config, ports)
        health = f"{_reachable(config.host)}:{ports.scheduler_health}"  # In clear, whatever the other speaks.
        self._scheduler = Service("scheduler", "scheduler", arguments, health, log, self._exits)

    def __enter__(self) -> Self:
        _make_store(self._store)
        try:
            for service in [*self._executors, self._scheduler]:
                service.start()
        except BaseException:
            self.stop(0.0)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def wait_ready(self, timeout: float) -> None:
        """Return when all services are; timeout in seconds."""
        deadline = time.monotonic() + timeout
        waiting = [*self._executors, self._scheduler]
        while waiting := [service for service in waiting if not service.is_ready()]:
            self.wait(_POLL_SECONDS)
            if time.monotonic() > deadline:
                names = ", ".join(service.name for service in waiting)
                last = waiting[0].last_line or "it logged nothing"
                raise LaunchError(f"{names} did not become ready within {timeout:g} s: {last}")

    def wait(self, timeout: float) -> None:
        """Return after `timeout` seconds; raise ServiceEnded as soon as a service ends by itself."""
        try:
            service = self._exits.get(timeout=timeout)
        except queue.Empty:
            return
        raise ServiceEnded(service.name, service.returncode, service.last_line)

    def stop(self, grace: float = 30.0) -> None:
        """Drain the scheduler, then the executors, each for at most `grace` seconds; kill what is left."""
        try:
            for services in ([self._scheduler], self._executors):
                for service in services:
                    service.terminate()
                for service in services:
                    service.join(grace)
        finally:  # an interrupt while draining comes here, too
            for service in [self._scheduler, *self._executors]:
                service.kill()
            self._reserved.close()


def _make_store(url: str) -> None:
    """Executors make none, and may be faster than the scheduler. What it may lose the services judge."""
    try:
        from adapter_store import AdapterStoreError, open_store
    except ModuleNotFoundError as error:
        raise LaunchError(
            f"an adapter store needs {error.name}: pip install 'lorafleet[scheduler]'"
        ) from error
    try:
        open_store(url, allow_volatile=True)
    except AdapterStoreError as error:
        raise LaunchError(f"store: {error}") from error


@dataclass(frozen=True, slots=True)
class _Ports:
    scheduler: int
    scheduler_metrics: int
    scheduler_health: int
    executors: tuple[int, ...]
    executor_metrics: tuple[int, ...]


def _choose_ports(config: LocalConfig, reserved: ExitStack) -> _Ports:
    """All ports, checked to be free: gRPC itself would share one that another gRPC server listens on. Those
    that the settings leave open are nobody else's until `reserved` closes."""
    count = config.executors
    wanted = [(config.host, config.port, "--port"), (config.host, config.metrics_port, "--metrics-port")]
    wanted += [(config.host, 0, "")] + [("127.0.0.1", 0, "")] * count
    wanted += [
        ("127.0.0.1", config.metrics_port and config.metrics_port + 1 + index, "--metrics-port")
        for index in range(count)
    ]
    with ExitStack() as sockets:  # held until all are found, so that none is given twice
        scheduler, metrics, health, *rest = [_find(sockets, reserved, *one) for one in wanted]
    return _Ports(scheduler, metrics, health, tuple(rest[:count]), tuple(rest[count:]))


def _find(sockets: ExitStack, reserved: ExitStack, host: str, port: int, flag: str) -> int:
    try:
        if not port:
            return free_port(reserved, host)
        hold_port(sockets, host, port)
        return port
    except (OSError, OverflowError) as error:  # the latter of a port above 65535
        why = getattr(error, "strerror", None) or error
        what = f"stop what listens there or choose with {flag} (0 takes a free one)"
        raise LaunchError(f"cannot listen on {host}:{port}: {why}; {what}") from error


def _executor_commands(config: LocalConfig, ports: _Ports) -> list[tuple[int, list[str]]]:
    """Each executor's port and arguments."""
    common = ["--model", str(config.model), "--store", str(config.store)]
    return [
        (
            port,
            [*common, "--listen", f"127.0.0.1:{port}", "--metrics-port", str(metrics), *config.executor_args],
        )
        for port, metrics in zip(ports.executors, ports.executor_metrics, strict=True)
    ]


def _scheduler_command(config: LocalConfig, ports: _Ports) -> list[str]:
    command = ["--model", str(config.model), "--store", str(config.store)]
    command += [
        "--listen",
        f"{config.host}:{ports.scheduler}",
        "--metrics-port",
        str(ports.scheduler_metrics),
        "--health-port",
        str(ports.scheduler_health),
    ]
    for port in ports.executors:
        command += ["--executor", f"127.0.0.1:{port}"]
    return [*command, *config.scheduler_args]


def _reachable(host: str) -> str:
    """Where to connect to what listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
