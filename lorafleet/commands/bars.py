"""One progress bar for each of several things that go on at once, on stderr."""

import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

_WIDTH = 24
_MAX_NAME = 40
FAILED = -1.0


def render(progress: Mapping[str, float], height: int) -> list[str]:
    """A line for each that is under way, as many as fit, and one for all of them together.

    progress: 0 to 1 by name; FAILED for what has ended badly. Pure.
    """
    done = sum(value >= 1 for value in progress.values())
    failed = sum(value == FAILED for value in progress.values())
    running = [(name, value) for name, value in progress.items() if 0 < value < 1]
    shown = running[: max(0, height - 2)]
    width = min(_MAX_NAME, max((len(name) for name, _ in shown), default=0))
    lines = [f"{name[:width]:<{width}} {_bar(value)} {value:4.0%}" for name, value in shown]
    summary = f"{done} of {len(progress)} done" + (f", {failed} refused" if failed else "")
    hidden = len(running) - len(shown)
    return [*lines, summary + (f", {hidden} more under way" if hidden else "")]


def _bar(fraction: float) -> str:
    return ("█" * round(fraction * _WIDTH)).ljust(_WIDTH, "░")


class Bars:
    """Thread-safe. Where stderr is no terminal, one line for each that ends."""

    def __init__(self, names: Sequence[str]) -> None:
        self._progress = dict.fromkeys(names, 0.0)
        self._live = sys.stderr.isatty()
        self._drawn = 0
        self._lock = threading.Lock()

    def bytes(self, name: str) -> Callable[[int, int], None]:
        """A callback for transfers: (bytes so far, bytes in all)."""
        return lambda done, total: self._set(name, done / total if total else 1.0)

    def failed(self, name: str) -> None:
        self._set(name, FAILED)

    def close(self) -> None:
        with self._lock:
            self._draw()

    def _set(self, name: str, value: float) -> None:
        with self._lock:
            before, self._progress[name] = self._progress[name], value
            if self._live:
                self._draw()
            elif value in (1.0, FAILED) and before != value:
                sys.stderr.write(f"{name} {'refused' if value == FAILED else 'sent'}\n")

    def _draw(self) -> None:
        if not self._live:
            return
        lines = render(self._progress, shutil.get_terminal_size().lines)
        up = f"\x1b[{self._drawn}A\r\x1b[J" if self._drawn else ""
        sys.stderr.write(up + "\n".join(lines) + "\n")
        sys.stderr.flush()
        self._drawn = len(lines)
