"""Copies adapters into slots: on the CPU between two steps, on a GPU beside the steps that run."""

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from executor.lora.arena import SlotArena, TensorCopy
from executor.lora.image import SlotImage
from kernels.punica import PunicaWrapperBase


class SlotWriter(Protocol):
    """All calls come from one thread, between steps: every step is enqueued between `before_step` and
    `after_step`, both with its slots."""

    def load(self, slot: int, image: SlotImage, extra: Sequence[TensorCopy] = ()) -> torch.cuda.Event | None:
        """The next step that reads this slot finds the image there, and the `extra` copies made. Their
        sources may be reused after the event (None: at once). ValueError, with the slot unchanged, for a
        foreign image or a slot out of range."""

    def clear(self, slot: int, extra: Sequence[TensorCopy] = ()) -> None:
        """The next step that reads this slot finds nothing there, and the `extra` copies made."""

    def load_seconds(self) -> list[float]:
        """What each load took that has ended since the last call."""

    def before_step(self, slots: Collection[int]) -> None: ...
    def after_step(self, slots: Collection[int]) -> None: ...


class WriterInTurn:
    """Copies where it is called: a step that was launched before has read the slot, or is enqueued before."""

    def __init__(self, arena: SlotArena, punica: PunicaWrapperBase) -> None:
        self._arena = arena
        self._punica = punica
        self._seconds: list[float] = []

    def load(self, slot: int, image: SlotImage, extra: Sequence[TensorCopy] = ()) -> None:
        started = time.perf_counter()
        self._arena.load(slot, image)
        _make(extra)
        self._punica.set_slot_rank(slot, image.max_rank)
        self._seconds.append(time.perf_counter() - started)

    def load_seconds(self) -> list[float]:
        seconds, self._seconds = self._seconds, []
        return seconds

    def clear(self, slot: int, extra: Sequence[TensorCopy] = ()) -> None:
        self._arena.clear(slot)
        _make(extra)

    def before_step(self, slots: Collection[int]) -> None:
        pass

    def after_step(self, slots: Collection[int]) -> None:
        pass


class SideStreamWriter:
    """One copy on a stream of its own into a buffer on the device, then one scatter kernel into the stripe.

    An image is packed at its own ranks, so that what crosses the bus is what the adapter has: at rank 16 in
    slots of rank 64 a quarter of a stripe. Scattering it costs a hundredth of the copy's time.

    A slot is written after the last launched step that reads it; a step runs after the writes into its slots.
    Both are waits on the device. What a load's `extra` copies write may have been another slot's: they wait
    for every launched step.
    """

    def __init__(self, arena: SlotArena, punica: PunicaWrapperBase) -> None:
        self._arena = arena
        self._punica = punica
        device = arena.storage.device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._staged = torch.empty(arena.layout.max_block_bytes, dtype=torch.uint8, device=device)
        self._read: dict[int, torch.cuda.Event] = {}  # slot -> behind the last step that reads it
        self._written: dict[int, torch.cuda.Event] = {}  # slot -> behind a write that no step has waited for
        self._loads: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # begins and ends, in their order
        # Compiled before the first adapter comes: a block without weights, whose ranks are 0, clears a slot.
        nothing = torch.zeros(arena.layout.block_bytes(0), dtype=torch.uint8, device=device)
        arena.enter(0, nothing)

    def load(self, slot: int, image: SlotImage, extra: Sequence[TensorCopy] = ()) -> torch.cuda.Event:
        self._arena.check(slot, image)
        with self._writing(slot):
            begin = self._mark()
            block = self._staged[: image.nbytes]
            block.copy_(image.block, non_blocking=True)
            for reader in self._read.values() if extra else ():
                self.stream.wait_event(reader)
            _make(extra)
            copied: torch.cuda.Event = self.stream.record_event()
            self._arena.enter(slot, block)
            self._loads.append((begin, self._mark()))
        self._punica.set_slot_rank(slot, image.max_rank)
        return copied

    def clear(self, slot: int, extra: Sequence[TensorCopy] = ()) -> None:
        with self._writing(slot):
            self._arena.clear(slot)
            _make(extra)

    def load_seconds(self) -> list[float]:
        seconds = []
        while self._loads and self._loads[0][1].query():  # type: ignore[no-untyped-call]
            begin, end = self._loads.pop(0)
            seconds.append(begin.elapsed_time(end) / 1e3)
        return seconds

    def before_step(self, slots: Collection[int]) -> None:
        for slot in self._written.keys() & set(slots):
            torch.cuda.current_stream(self.stream.device).wait_event(self._written.pop(slot))

    def after_step(self, slots: Collection[int]) -> None:
        if slots:
            over = torch.cuda.current_stream(self.stream.device).record_event()
            self._read.update(dict.fromkeys(slots, over))

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    @contextmanager
    def _writing(self, slot: int) -> Iterator[None]:
        reader = self._read.pop(slot, None)
        if reader is not None:
            self.stream.wait_event(reader)
        with torch.cuda.stream(self.stream):
            yield
        self._written[slot] = self.stream.record_event()


def _make(copies: Sequence[TensorCopy]) -> None:
    """On the current stream."""
    for target, source in copies:
        target.copy_(source, non_blocking=True)


def make_writer(arena: SlotArena, punica: PunicaWrapperBase) -> SlotWriter:
    return SideStreamWriter(arena, punica) if arena.storage.is_cuda else WriterInTurn(arena, punica)
