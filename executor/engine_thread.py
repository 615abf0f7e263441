"""The engine on its own thread: commands in through a queue, events out through callbacks."""

import logging
import sys
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from executor.errors import RankLost
from executor.events import EngineInfo, StepEvents
from lorafleet.garbage import QuietCollector

if TYPE_CHECKING:
    from executor.engine import Engine  # With it comes torch.

Command = Callable[["Engine"], None]

# How long the thread sleeps for commands at most. Sequences that only wait for a load still have time limits.
IDLE_WAIT_S = 1.0
WAITING_WAIT_S = 0.05
# An engine that fails so many steps in a row does not recover by itself.
MAX_FAILED_STEPS = 3
# Seconds. Each call into torch or the driver gives the interpreter away, and waits so long to get it back
# from a busy thread: one that loads adapters, or the event loop. With Python's 5 ms the device waits, too.
SWITCH_INTERVAL_S = 0.0002

logger = logging.getLogger(__name__)


class EngineThread:
    """Builds the engine (`build` takes the function that wakes this thread), then runs it until `stop`.

    The callbacks run on this thread and must not wait: `on_ready` once; `on_events` after each beat; `on_end`
    last, with the exception that ended it or None.
    """

    def __init__(
        self,
        build: Callable[[Callable[[], None]], "Engine"],
        on_ready: Callable[[EngineInfo], None],
        on_events: Callable[[StepEvents], None],
        on_end: Callable[[Exception | None], None],
    ) -> None:
        self._build = build
        self._on_ready = on_ready
        self._on_events = on_events
        self._on_end = on_end
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._collector = QuietCollector()
        self._failed_steps = 0
        self._busy_since: float | None = None
        # A daemon: a hung step must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Run `command` between steps, after those submitted before. From any thread."""
        self._commands.put(command)

    def wake(self) -> None:
        self._commands.put(_nothing)

    def stop(self) -> None:
        """The thread ends after the step it is in; what is queued before still happens."""
        self._commands.put(None)

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    @property
    def stalled_s(self) -> float:
        """Seconds since the last step ended, or since work came after a pause; 0 while idle. Any thread."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def _run(self) -> None:
        try:
            engine = self._build(self.wake)
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            self._collector.start()
            self._on_ready(engine.info)
            try:
                self._loop(engine)
            finally:
                engine.close()
                self._collector.stop()
        except Exception as error:
            self._on_end(error)
        else:
            self._on_end(None)

    def _loop(self, engine: "Engine") -> None:
        busy = False
        while self._run_commands(engine, 0.0 if busy else self._patience(engine)):
            self._busy_since = self._busy_since or time.monotonic()
            events = self._beat(engine)
            self._on_events(events)
            busy = events.ran or events.runs
            self._busy_since = time.monotonic() if busy else None

    def _patience(self, engine: "Engine") -> float:
        return WAITING_WAIT_S if engine.batcher.sequences else IDLE_WAIT_S

    def _run_commands(self, engine: "Engine", patience: float) -> bool:
        """Wait up to `patience` seconds for a command, then run all there are. False: it is time to stop."""
        try:
            command = self._commands.get(timeout=patience) if patience else self._commands.get_nowait()
        except Empty:
            if patience == IDLE_WAIT_S:
                self._collector.idle()
            return True
        try:
            while command is not None:
                command(engine)
                command = self._commands.get_nowait()
        except Empty:
            return True
        return False

    def _beat(self, engine: "Engine") -> StepEvents:
        try:
            events = engine.step()
        except RankLost:
            raise
        except Exception as error:
            self._failed_steps += 1
            if self._failed_steps >= MAX_FAILED_STEPS:
                raise
            return engine.fail(error)
        if events.ran:
            self._failed_steps = 0
        return events


def _nothing(engine: "Engine") -> None:
    """The command of a wake-up."""
