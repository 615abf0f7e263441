"""A second stream, for what a layer can do before its base product is there; eagerly or under capture."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """Runs a layer's shrink beside its base product, which reads the same x.

        with side.fork():
            lora_shrink(h, x, ...)
        y = base_layer(x)
        side.join()
        lora_expand(y, h, ...)  # or a fused follower

    Allocate h before the fork: then it belongs to the current stream, which joins before it reads h. One fork
    may be open at a time, and every fork must be joined before a capture ends.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def fork(self) -> Iterator[None]:
        """What is launched inside waits for the current stream's work so far, and only for that."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What the current stream launches from here on waits for the fork's work."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
