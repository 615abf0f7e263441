"""One service of ours as a child process: its log, its health and its end."""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

LogLine = Callable[[str, str], None]
"""Called on a thread with (service, line without its end)."""

# For what a process said last, once it has ended: one that it left behind may keep the log open.
_LAST_WORDS_S = 5.0
_HEALTH_NAMES = {"scheduler": "lorafleet.v1.Inference", "executor": "lorafleet.v1.Executor"}


class Service:
    """module: "scheduler" or "executor". `exits` gets this object when its process has ended."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        address: str,
        log: LogLine,
        exits: "queue.SimpleQueue[Service]",
    ) -> None:
        self.name = name
        self.last_line = ""
        self._module = module
        self._command = [sys.executable, "-m", "lorafleet.child", module, *arguments]
        self._address = address
        self._log = log
        self._exits = exits
        self._process: subprocess.Popen[str] | None = None
        self._reader = threading.Thread(target=self._read_log, name=f"{name}-log", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name=f"{name}-watch", daemon=True)

    @property
    def returncode(self) -> int:
        """The code as subprocess has it; 0 before the start and while it runs."""
        return (self._process.returncode if self._process else None) or 0

    def start(self) -> None:
        # Its own session: a Ctrl-C in the terminal reaches the launcher alone, which stops all in order.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader.start()
        self._watcher.start()

    def is_ready(self) -> bool:
        """What its health service says now."""
        import grpc
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        request = health_pb2.HealthCheckRequest(service=_HEALTH_NAMES[self._module])
        with grpc.insecure_channel(self._address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            try:
                response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=2)
            except grpc.RpcError:
                return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def terminate(self) -> None:
        """Ask it to drain and end."""
        if self._process:
            self._process.terminate()

    def join(self, timeout: float) -> None:
        """Wait until it has ended and its last line is told, or for `timeout` seconds."""
        if self._process:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
                self._reader.join(_LAST_WORDS_S)

    def kill(self) -> None:
        """End it and what it started, at once."""
        if self._process and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _read_log(self) -> None:
        if self._process is None or self._process.stdout is None:
            return
        for line in self._process.stdout:
            self.last_line = line.strip() or self.last_line
            with suppress(OSError, ValueError):  # nobody reads our log: a full pipe would stop the service
                self._log(self.name, line.rstrip())

    def _watch(self) -> None:
        if self._process is None:
            return
        self._process.wait()
        self._reader.join(_LAST_WORDS_S)  # the last line says why
        self._exits.put(self)
