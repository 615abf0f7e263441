"""What the demo shows while it runs: live rows in a terminal, plain lines elsewhere."""

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from lorafleet.terminal import ProgressBar, note

if TYPE_CHECKING:
    from rich.table import Table


class View(Protocol):
    """Told of everything as it happens; entered while answers stream."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...
    def stage(self, label: str, fraction: float) -> None:
        """Progress of what comes before the answers; fraction: 0 to 1."""

    def note(self, text: str) -> None:
        """A remark."""

    def ask(self, question: str, names: Sequence[str]) -> None:
        """A round begins: all of `names` are asked at once."""

    def show(self, name: str, text: str) -> None:
        """An answer so far."""

    def answered(self, name: str, text: str) -> None:
        """A whole answer."""


def make_view(output: TextIO) -> View:
    """Live rows when `output` is a terminal and rich is installed."""
    if output.isatty() and importlib.util.find_spec("rich"):
        return LiveView(output)
    return PlainView(output)


class PlainView:
    """One line an answer, when it is whole."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._bar = ProgressBar()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def stage(self, label: str, fraction: float) -> None:
        self._bar.update(label, fraction)

    def note(self, text: str) -> None:
        note(text)

    def ask(self, question: str, names: Sequence[str]) -> None:
        self._write(f"\n{question}")

    def show(self, name: str, text: str) -> None:
        pass

    def answered(self, name: str, text: str) -> None:
        self._write(f"  [{name}] {' '.join(text.split())}")

    def _write(self, line: str) -> None:
        self._output.write(line + "\n")
        self._output.flush()


class LiveView:
    """A row for each adapter that fills while its answer streams; finished rounds stay above."""

    def __init__(self, output: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._bar = ProgressBar()
        self._question = ""
        self._texts: dict[str, str] = {}
        self._live = Live(
            get_renderable=self._table,
            console=Console(file=output),
            refresh_per_second=12,
            vertical_overflow="crop",
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def stage(self, label: str, fraction: float) -> None:
        self._bar.update(label, fraction)

    def note(self, text: str) -> None:
        note(text)

    def ask(self, question: str, names: Sequence[str]) -> None:
        if self._texts:
            self._live.console.print(self._table())
        self._question = question
        self._texts = dict.fromkeys(names, "")

    def show(self, name: str, text: str) -> None:
        self._texts[name] = text

    def answered(self, name: str, text: str) -> None:
        self._texts[name] = text

    def _table(self) -> "Table":
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self._question, title_justify="left", expand=True, show_header=False)
        table.add_column(style="bold cyan", no_wrap=True)
        table.add_column(ratio=1)
        for name, text in self._texts.items():
            table.add_row(name, Text(" ".join(text.split())))
        return table
