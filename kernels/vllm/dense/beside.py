"""Shrink on a second stream, beside the base product that reads the same x.

The product is launched first: it takes its multiprocessors, and the small launch what is left.
"""

from collections.abc import Callable
from functools import lru_cache

import torch

# Steps of up to so many rows, and from so many on: what shrink adds behind / beside the products of
# Llama-3.1-8B on one H200 is 34.0 / 22.6 us a layer at (64, 8), 58.5 / 52.6 at (64, 64), 97 / 102 at
# (256, 64), 177 / 185 at (2048, 8), 587 / 558 at (8192, 8).
_FEW_ROWS, _MANY_ROWS = 128, 8192


class Fork:
    """One device's second stream, and the event that says since when the last x is there."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        self._ready.record(torch.cuda.current_stream(self._stream.device))

    def run(self, launch: Callable[[], None]) -> None:
        """launch() behind the mark; what the current stream launches from here on waits for it.

        What it reads must not change before, and what it writes must be allocated before, so that it belongs
        to the current stream.
        """
        self._stream.wait_event(self._ready)
        with torch.cuda.stream(self._stream):
            launch()
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


@lru_cache(maxsize=64)
def fork_of(device: torch.device) -> Fork:
    return Fork(device)


def pays(rows: int) -> bool:
    """Whether shrink should run beside the product, in steps of so many rows."""
    return rows <= _FEW_ROWS or rows >= _MANY_ROWS
