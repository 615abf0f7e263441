"""Real services as single processes, which a test may kill, stop and start again on their ports."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from adapter_store import open_store
from lorafleet import Client
from lorafleet.ports import free_port
from tests.support.services.fleet import read_metrics

ROOT = Path(__file__).parents[3]
READINESS = {"scheduler": "lorafleet.v1.Inference", "executor": "lorafleet.v1.Executor"}
PATIENCE_S = 120.0  # Until a test that waits for something gives up; never what it measures.


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Asks a fifth of the time at most, or what is waited for would have no core to happen on."""
    deadline = (asked := time.monotonic()) + PATIENCE_S
    while not condition():
        now = time.monotonic()
        assert now < deadline, f"waited in vain: {what}"
        time.sleep(min(max(0.01, 4 * (now - asked)), 0.1))
        asked = time.monotonic()


class Node:
    """One service on ports of its own; its log goes on in one file over all starts."""

    def __init__(self, module: str, name: str, folder: Path, arguments: Iterable[str]) -> None:
        self._reserved = ExitStack()  # while it is down, too
        port, metrics_port = (free_port(self._reserved, "127.0.0.1") for _ in range(2))
        self.module, self.name = module, name
        self.program = module  # What is run; a test may put one of its own in its place.
        self.environment: dict[str, str] = {}
        self.address = f"127.0.0.1:{port}"
        self.metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        self._log = folder / f"{name}.log"
        self._arguments = ["--listen", self.address, "--metrics-port", str(metrics_port), *arguments]
        self.health_address = self.address
        if "--tls-cert-file" in self._arguments:
            health_port = free_port(self._reserved, "127.0.0.1")
            self.health_address = f"127.0.0.1:{health_port}"
            self._arguments += ["--health-port", str(health_port)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        # lorafleet.child ends the service when this process is gone, however it ended.
        command = [sys.executable, "-m", "lorafleet.child", self.program, *self._arguments]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self.environment},
            )
        return self

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process, f"{self.name} was not started"
        return self._process

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()

    def wait(self) -> int:
        """Its exit status."""
        return self.process.wait(PATIENCE_S)

    def terminate(self) -> None:
        if self._process and self._process.poll() is None:
            self.signal(signal.SIGTERM)

    def stop(self) -> None:
        """For good. A second SIGTERM cuts a drain short."""
        self._reserved.close()
        self.terminate()
        if self._process and self._process.poll() is None:
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()

    def health(self, service: str = "") -> str:
        """It says "SERVING", "NOT_SERVING", or the code of the failed call."""
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(self.health_address, options=options) as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            try:
                response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
            except grpc.RpcError as error:
                return str(error.code().name)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))

    def is_ready(self) -> bool:
        assert self.process.poll() is None, f"{self.name} ended: {self.log()[-800:]}"
        return self.health(READINESS[self.module]) == "SERVING"

    def wait_ready(self) -> Self:
        wait_until(self.is_ready, f"{self.name} gets ready")
        return self

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def metrics(self) -> dict[str, float]:
        return read_metrics(self.metrics_url)

    def gauge(self, name: str) -> float:
        return self.metrics()[f"lorafleet_{self.module}_{name}"]

    def count(self, name: str) -> float:
        return self.gauge(f"{name}_total")

    def wait_for_news(self) -> None:
        """Until a scheduler has heard all that the store could tell when this was called, and read it."""
        for _ in ("heard", "and, before the next question, read"):
            now = time.monotonic()
            wait_until(
                lambda now=now: time.monotonic() - self.gauge("store_age_seconds") > now,  # type: ignore[misc]
                f"{self.name} asks the store for news",
            )


@dataclass(frozen=True)
class Pair:
    """A scheduler and the executor behind it."""

    scheduler: Node
    executor: Node

    def client(self, token: str | None = None) -> Client:
        return Client(self.scheduler.address, token=token, timeout=PATIENCE_S)

    def is_idle(self) -> bool:
        """Nobody holds anything: no request, seat, KV block or slot, and nothing is being loaded."""
        here, there = self.executor.metrics(), self.scheduler.metrics()
        executor = {name: here[f"lorafleet_executor_{name}"] for name in _ZERO_WHEN_IDLE}
        return (
            not any(executor.values())
            and here["lorafleet_executor_free_kv_blocks"] == here["lorafleet_executor_kv_blocks"]
            and there["lorafleet_scheduler_live_requests"] == 0
            and there["lorafleet_scheduler_queue_requests"] == 0
        )

    def wait_idle(self) -> None:
        wait_until(self.is_idle, "everything is given back")


_ZERO_WHEN_IDLE = ("running_sequences", "waiting_sequences", "slots_in_use", "loads_in_flight")


@dataclass
class Cluster:
    """Any number of services over one model and one store; leaving it ends them all."""

    model: Path
    folder: Path
    nodes: list[Node] = field(default_factory=list)
    store_url: str = ""  # for another store than the folder

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def executor(self, name: str, *arguments: str) -> Node:
        store = self.store_url or str(self.store)
        open_store(store)  # an executor makes none, and these start before any scheduler
        common = ("--model", str(self.model), "--store", store, "--torch-threads", "1")
        return self._add(Node("executor", name, self.folder, (*common, *arguments)))

    def scheduler(self, name: str, executors: Iterable[Node | str], *arguments: str) -> Node:
        common = ["--model", str(self.model), "--store", self.store_url or str(self.store)]
        for each in executors:
            common += ["--executor", each if isinstance(each, str) else each.address]
        return self._add(Node("scheduler", name, self.folder, (*common, *arguments)))

    def pair(self, name: str, executor: Iterable[str] = (), scheduler: Iterable[str] = ()) -> Pair:
        """Both started and ready."""
        there = self.executor(f"{name}-executor", *executor).start()
        here = self.scheduler(f"{name}-scheduler", [there], *scheduler).start()
        there.wait_ready()
        return Pair(here.wait_ready(), there)

    def _add(self, node: Node) -> Node:
        self.nodes.append(node)
        return node

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for node in self.nodes:
            node.terminate()
        for node in self.nodes:
            node.stop()
