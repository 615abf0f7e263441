"""Loader threads and their end."""

import threading
from queue import SimpleQueue

from executor.adapters.loader import Loader


class Contended(SimpleQueue[str | None]):
    """Looks full to who asks, and is empty when they take: a loader thread was faster."""

    def empty(self) -> bool:
        return False


def test_closing_does_not_wait_for_a_load_that_a_thread_has_taken() -> None:
    loader = Loader[str](lambda digest: digest, 0, lambda: None)
    loader._todo = Contended()
    closing = threading.Thread(target=loader.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
