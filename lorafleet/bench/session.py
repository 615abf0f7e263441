"""A series of plays against one system, each with what the executors counted meanwhile."""

import asyncio
import gc
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from lorafleet.bench.errors import BenchError
from lorafleet.bench.metrics import cpu_shares, read_cpu_seconds
from lorafleet.bench.play import Caller, play
from lorafleet.bench.requests import Lane, Recording, Request
from lorafleet.bench.slot_use import SlotUse, read_totals, slot_use
from lorafleet.bench.statistics import Summary, summarize
from lorafleet.bench.workload import Names

PROGRESS_S = 1.0
_LOAD_TOKENS, _LOAD_AT_ONCE = 8, 8
_WARM_UP_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Played:
    """`slots` is None when the executors' metrics are not known. `cpu`: cores that each process used."""

    recording: Recording
    slots: SlotUse | None
    cpu: Mapping[str, float] = field(default_factory=dict)

    def summary(self, lane: str | None = None) -> Summary:
        """The summary of one lane, or of all together."""
        return summarize(self.recording.lane(lane) if lane else self.recording)


@dataclass(slots=True)
class Session:
    """`current` is the play that runs, or ran last: what an interrupted one measured can be read from it.

    `drop` makes the system forget adapters outside the store; None when it cannot.
    """

    caller: Caller
    names: Names
    seed: int
    note: Callable[[str], None]
    drop: Callable[[Sequence[str]], None] | None = None
    current: Recording = field(default_factory=Recording)
    label: str = ""
    used: set[str] = field(default_factory=set)  # adapters that were asked for so far
    unread: str = ""  # why the metrics could not be read, when that was told last

    async def run(self, label: str, lanes: Sequence[Lane]) -> Played:
        """Raises EngineEnded; failed requests are in the recording."""
        before = await self._metrics()
        self.label, self.current = label, Recording()
        self.used.update(request.adapter for lane in lanes for request in lane.requests if request.adapter)
        progress = asyncio.create_task(self._tell_progress(sum(len(lane.requests) for lane in lanes)))
        gc.collect()
        gc.disable()  # a collection here would be measured as a pause there
        cpu_before = read_cpu_seconds(before) | {"client": time.process_time()}
        try:
            await play(lanes, self.caller, self.current)
        finally:
            gc.enable()
            progress.cancel()
        client = {"client": time.process_time()}
        after = await self._metrics()
        seconds = (self.current.ended or 0.0) - self.current.started
        return Played(
            self.current,
            slot_use(read_totals(before), read_totals(after)),
            cpu_shares(cpu_before, read_cpu_seconds(after) | client, seconds),
        )

    async def warm_up(self) -> None:
        """A few requests to the base model: connections, caches, and whatever is compiled at first use."""
        requests = [Request(0.0, tuple(range(_WARM_UP_TOKENS)), _LOAD_TOKENS)] * 4
        await self.run("warming up", [Lane("warm-up", requests)])

    async def load(self, adapters: Iterable[str]) -> Played:
        """Uses each adapter once, so that the executors hold what they have room for.

        Raises BenchError when one cannot be used at all: nothing measured afterwards would mean anything.
        """
        prompt = tuple(range(_LOAD_TOKENS))
        requests = [Request(0.0, prompt, 1, adapter) for adapter in adapters]
        played = await self.run(f"loading {len(requests)} adapters", [Lane("load", requests, _LOAD_AT_ONCE)])
        for record in played.recording.records:
            if record.error:
                raise BenchError(
                    f"adapter {record.request.adapter} cannot be used: {record.error}; "
                    "`lorafleet bench make-adapters` makes them"
                )
        return played

    def forget(self, adapters: Sequence[str], workload: str) -> bool:
        """Whether they are in the store alone now; if not, it is said that `workload` is left out."""
        if self.drop:
            self.drop(adapters)
        elif self.used.intersection(adapters):
            self.note(f"{workload} is left out: its adapters were used before, and this cannot drop them")
            return False
        return True

    async def _metrics(self) -> list[str]:
        """A reading that fails is as good as none: requests are measured all the same."""
        try:
            return await self.caller.metrics()
        except OSError as error:
            if self.unread != (reason := f"the executors' metrics cannot be read: {error}"):
                self.note(reason)
            self.unread = reason
            return []

    async def _tell_progress(self, total: int) -> None:
        with suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(PROGRESS_S if sys.stderr.isatty() else 5 * PROGRESS_S)
                self.note(f"{self.label}: {_progress(self.current, total)}")


def _progress(recording: Recording, total: int) -> str:
    """Cheap: it is told while the measurement runs."""
    whole = sum(record.whole for record in recording.records)
    pieces = sum(len(record.pieces) for record in recording.records)
    failed = sum(bool(record.error) for record in recording.records)
    return f"{whole} of {total} requests, {pieces} pieces" + (f", {failed} failed" if failed else "")
