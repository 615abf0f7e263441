"""The trace of steps that `--step-trace` asks for: a JSON object a line, a line a step."""

import gc
import json
import logging
import resource
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import torch

from executor.adapters.pager import Pager
from executor.batch.batcher import Batcher, StepPlan
from executor.errors import StartError
from executor.step.trace import Trace, TracedStep

logger = logging.getLogger(__name__)

_WRITE_EVERY_S = 0.5


class StepTrace(Trace):
    """A line is written when its step has landed and the device's times are known. Nothing waits for those,
    and a thread of its own writes. executor/README.md says what a line has."""

    def __init__(self, file: Path, device: torch.device) -> None:
        """Replaces the file. Raises StartError."""
        try:
            self._writer = _Writer(file.open("w", encoding="utf-8"))
        except OSError as error:
            raise StartError(f"--step-trace {file} cannot be written: {error.strerror}") from error
        self._on_gpu = device.type == "cuda"
        self._host = _HostTimes()
        self._began = 0.0  # this heartbeat
        self._steps = 0
        self._captured = 0
        self._begins: torch.cuda.Event | None = None
        self._ended_before: torch.cuda.Event | None = None  # the last step whose times were read
        self._latest: TracedStep | None = None  # of this heartbeat
        self._landed: deque[TracedStep] = deque()  # not written yet

    def beat_begins(self) -> None:
        self._began = self._host.lap("gap")

    def lap(self, part: str) -> None:
        self._host.lap(part)

    def captured(self, rows: int) -> None:
        self._captured = rows

    def device_begins(self) -> None:
        self._captured = 0
        self._begins = self._event()

    def launched(self, plan: StepPlan, batcher: Batcher, pager: Pager[Any]) -> TracedStep:
        self._steps += 1
        told = {"step": self._steps, "at": round(self._began, 6), "captured": self._captured}
        told |= _of_plan(plan) | _of_books(batcher, pager, self._began)
        self._latest = TracedStep(told, self._begins, None)
        self._host.give(self._latest)
        return self._latest

    def drawn(self, step: TracedStep | None) -> None:
        if step is not None:
            step.ends = self._event()

    def landed(self, step: TracedStep | None, seconds: float) -> None:
        if step is None:
            return
        step.told |= {"landed": round(time.monotonic(), 6), "ms": _ms(seconds)}
        self._host.give(step)
        self._landed.append(step)
        self._latest = step

    def beat_over(self) -> None:
        self._host.lap("emit")
        if self._latest is None:
            self._host.was_idle()
            return
        self._host.give(self._latest)
        self._latest = None
        while self._landed and self._is_over(self._landed[0]):
            self._write(self._landed.popleft())

    def close(self) -> None:
        for step in self._landed:
            self._write(step)
        self._landed.clear()
        self._host.close()
        self._writer.close()

    def _event(self) -> torch.cuda.Event | None:
        if not self._on_gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _is_over(self, step: TracedStep) -> bool:
        return step.ends is None or step.ends.query()  # type: ignore[no-untyped-call]

    def _write(self, step: TracedStep) -> None:
        device: dict[str, float] = {}
        if step.begins and step.ends and self._is_over(step):
            device["device_ms"] = round(step.begins.elapsed_time(step.ends), 3)
            if self._ended_before:
                device["device_gap_ms"] = round(self._ended_before.elapsed_time(step.begins), 3)
            self._ended_before = step.ends
        self._writer.write(step.told | device | self._host.told(step))


class _HostTimes:
    """The times of the engine's thread, since a step took them last: seconds by part, and what else adds up.

    A collection of garbage stops that thread, on whichever one it runs.
    """

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._others: defaultdict[str, float] = defaultdict(float)
        self._last = time.monotonic()
        self._collects_since = self._last
        self._gc_ms = 0.0  # since the start, told by any thread
        self._used = self._use()
        gc.callbacks.append(self._on_collection)

    def lap(self, part: str) -> float:
        now = time.monotonic()
        self._sums[part] += now - self._last
        self._last = now
        return now

    def give(self, step: TracedStep) -> None:
        """All that is summed up is the step's."""
        used = self._use()
        for name, value in used.items():
            self._others[name] += value - self._used[name]
        self._used = used
        for sums, own in ((self._sums, step.host), (self._others, step.used)):
            for name, value in sums.items():
                own[name] = own.get(name, 0.0) + value
            sums.clear()

    def was_idle(self) -> None:
        """Nothing was launched, nothing has landed: it belongs to the gap before the next step."""
        gap = sum(self._sums.values())
        self._sums.clear()
        self._sums["gap"] = gap

    def told(self, step: TracedStep) -> dict[str, Any]:
        host = {part: _ms(seconds) for part, seconds in step.host.items()}
        return {"host_ms": host} | {name: round(value, 3) for name, value in step.used.items()}

    def close(self) -> None:
        """Again is no harm."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            self._collects_since = time.monotonic()
        else:
            self._gc_ms += 1e3 * (time.monotonic() - self._collects_since)

    def _use(self) -> dict[str, float]:
        """Use of this thread: its CPU time, page faults, and how often it lost its core to somebody else."""
        usage = resource.getrusage(resource.RUSAGE_THREAD)
        return {
            "cpu_ms": 1e3 * time.thread_time(),
            "faults": usage.ru_minflt + usage.ru_majflt,
            "switches": usage.ru_nivcsw,
            "gc_ms": self._gc_ms,
        }


def _of_plan(plan: StepPlan) -> dict[str, Any]:
    """A decoding row is the only one of a sequence that draws: a prompt's last one, too."""
    draws = set(plan.draws)
    rows = sum(plan.num_tokens.values())
    decoding = sum(count == 1 and sequence in draws for sequence, count in plan.num_tokens.items())
    return {
        "rows": rows,
        "decode_rows": decoding,
        "prompt_rows": rows - decoding,
        "sequences": len(plan.num_tokens),
        "adapters": len({sequence.digest for sequence in plan.num_tokens} - {""}),
        "page_ins": len(plan.page_ins),
        "slot_hits": len(plan.slot_hits),
        "preempted": len(plan.preempted),
    }


def _of_books(batcher: Batcher, pager: Pager[Any], now: float) -> dict[str, Any]:
    """What waits behind this step, and for what."""
    waiting = batcher.waiting
    cold = [each.digest for each in waiting if each.digest and batcher.slots.find(each.digest) is None]
    for_load = sum(digest not in pager.host for digest in cold)
    return {
        "running": len(batcher.running),
        "waiting": len(waiting),
        "waiting_for_slot": len(cold) - for_load,
        "waiting_for_load": for_load,
        "oldest_wait_s": round(now - waiting[0].arrived_at, 3) if waiting else 0.0,
        "loading": pager.num_loading,
        "free_blocks": batcher.blocks.num_free,
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


class _Writer:
    """Takes lines without waiting. A file that takes no more is told in the log, and left."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lines: deque[Mapping[str, Any]] = deque()
        self._takes_more = True
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="step-trace", daemon=True)
        self._thread.start()

    def write(self, line: Mapping[str, Any]) -> None:
        if self._takes_more:
            self._lines.append(line)

    def close(self) -> None:
        """All lines are in the file."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._file:
                while not self._stop.wait(_WRITE_EVERY_S):
                    self._drain()
                self._drain()
        except OSError as error:
            logger.warning("the trace of steps ends here: %s", error)
        finally:
            self._takes_more = False
            self._lines.clear()

    def _drain(self) -> None:
        while self._lines:
            self._file.write(json.dumps(self._lines.popleft()) + "\n")
        self._file.flush()
