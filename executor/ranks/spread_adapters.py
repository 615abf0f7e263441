"""Loads adapters on all ranks at once: everywhere or nowhere, into host memory and into slots.

An adapter is in a slot when the last rank's copy is complete.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from queue import SimpleQueue

from executor.adapters.slot_writer import SlotWriter
from executor.lora.image import SlotImage
from executor.ranks.leader import Ranks, failure_in, total_bytes
from executor.ranks.messages import Answer, ClearSlot, CopyIntoSlot, ForgetImage, LoadAdapter
from executor.rejection import RejectedByRank


@dataclass(frozen=True, slots=True)
class SpreadImage:
    """One adapter, cut: rank 0's image, and the ticket under which every other rank keeps its own."""

    own: SlotImage
    ticket: int
    nbytes: int  # on all ranks
    num_full_heads: int = 0  # full heads are served on one rank only


class SpreadAdapters:
    """What a pager needs, over several ranks.

    `load_image` runs on loader threads, as many as there are lanes; all else belongs to the engine's thread.
    `patience_s`: how much longer than this rank another one may take for a load.
    """

    def __init__(
        self,
        ranks: Ranks,
        writer: SlotWriter,
        nbytes_per_slot: int,
        host_bytes: int,
        load_own: Callable[[str], SlotImage],
        patience_s: float,
    ) -> None:
        self._ranks = ranks
        self._writer = writer
        self._load_own = load_own
        self._patience_s = patience_s
        self._tickets = count()
        self._lanes: SimpleQueue[int] = SimpleQueue()
        for number in range(len(ranks.lanes)):
            self._lanes.put(number)
        self.nbytes_per_slot = nbytes_per_slot  # on all ranks
        self.max_images = host_bytes // nbytes_per_slot

    def slot_nbytes(self, num_full_heads: int) -> int:
        """The bytes of the stripes on all ranks: there are no full heads over several."""
        return self.nbytes_per_slot

    def load_image(self, digest: str) -> SpreadImage:
        """Each rank reads the adapter and cuts its own part. When one of them fails, the images of the others
        are forgotten, and its error (RejectedByRank when it is not this rank) is raised."""
        number, ticket = self._lanes.get(), next(self._tickets)
        try:
            return self._load_on(self._ranks.lanes[number], ticket, digest)
        finally:
            self._lanes.put(number)

    def _load_on(self, lane: Sequence[Connection], ticket: int, digest: str) -> SpreadImage:
        _send(lane, LoadAdapter(ticket, digest))
        try:
            own = self._load_own(digest)
        except Exception:
            self._answers(lane)  # they must not be taken for those to the next message
            _send(lane, ForgetImage(ticket))
            raise
        answers = self._answers(lane)
        if (failed := failure_in(answers)) is not None:
            _send(lane, ForgetImage(ticket))
            raise RejectedByRank(failed.rejection)
        return SpreadImage(own, ticket, own.nbytes + total_bytes(answers))

    def _answers(self, lane: Sequence[Connection]) -> list[Answer]:
        return self._ranks.receive(lane, self._patience_s)

    def load(self, slot: int, image: SpreadImage) -> None:
        """Copy on every rank; returns when all copies are complete. When one fails, all empty the slot."""
        self._ranks.tell(CopyIntoSlot(slot, image.ticket))
        try:
            self._writer.load(slot, image.own)
        except Exception:
            self._ranks.answers()
            self.clear(slot)
            raise
        if (failed := failure_in(self._ranks.answers())) is not None:
            self.clear(slot)
            raise RejectedByRank(failed.rejection)

    def clear(self, slot: int) -> None:
        self._writer.clear(slot)
        self._ranks.tell(ClearSlot(slot))

    def load_seconds(self) -> list[float]:
        return self._writer.load_seconds()

    def forget(self, image: SpreadImage) -> None:
        """The host tier has given it up."""
        self._ranks.tell(ForgetImage(image.ticket))

    def make_room(self, keep: Container[str], evict: Callable[[], bool]) -> None:
        """Images have memory of their own, which the host tier counts when they are there."""

    def close(self) -> None:
        pass


def _send(lane: Sequence[Connection], message: LoadAdapter | ForgetImage) -> None:
    for connection in lane:
        connection.send(message)
