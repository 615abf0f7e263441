"""How many requests executors have got, by time: read from their metrics again and again."""

import asyncio
import time
from collections.abc import Sequence

from tests.support.services.cluster import Node

EVERY_S = 0.25
_ENDED = "lorafleet_executor_dispatches_total"
_LIVE = ("lorafleet_executor_running_sequences", "lorafleet_executor_waiting_sequences")


class Dispatches:
    """Seconds are since it was made. Counts are those that had ended by then, or ran."""

    def __init__(self, executors: Sequence[Node]) -> None:
        self._executors = executors
        self._began = time.monotonic()
        self._seen: list[tuple[float, list[int]]] = []

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            reads = [asyncio.to_thread(dispatched, node) for node in self._executors]
            counts = await asyncio.gather(*reads)
            self._seen.append((time.monotonic() - self._began, counts))
            await asyncio.sleep(EVERY_S)

    def first(self, number: int) -> float:
        """When an executor had one that it had not at first; infinity for never."""
        before = self._seen[0][1][number]
        return next((round(at, 1) for at, counts in self._seen if counts[number] > before), float("inf"))

    def share(self, number: int, from_s: float, to_s: float, fleet: int) -> float:
        """Of what all got in between, as a part of what it would be if `fleet` executors got the same."""
        first, last = self._at(from_s), self._at(to_s)
        got = [after - before for before, after in zip(first, last, strict=True)]
        return round(got[number] * fleet / max(1, sum(got)), 2)

    def after(self, number: int, from_s: float) -> int:
        """What an executor got from then on."""
        return self._seen[-1][1][number] - self._at(from_s)[number]

    def _at(self, seconds: float) -> list[int]:
        return next((counts for at, counts in self._seen if at >= seconds), self._seen[-1][1])


def dispatched(node: Node) -> int:
    metrics = node.metrics()
    ended = sum(count for name, count in metrics.items() if name.startswith(_ENDED))
    return int(ended + sum(metrics[name] for name in _LIVE))
