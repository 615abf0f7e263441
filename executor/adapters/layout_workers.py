"""The processes that lay out adapters, as the executor sees them: it starts, asks and replaces them.

Hundreds of tensors mean thousands of small steps of Python, and on a thread of the executor each of them may
take the interpreter from the engine's.

A process only makes a plain load faster. Whatever is not plain, it leaves to the loader's thread that asked:
other kinds of adapters, every error, and what a process was asked that is gone.
"""

import logging
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import Empty, LifoQueue
from threading import Lock, Thread

import numpy as np
import torch

from executor.config import ExecutorConfig
from executor.lora.image import Buffer, SlotImage
from executor.lora.layout import SlotLayout

_END_GRACE_S = 5.0
# Between two that take the place of others: what ended those may go on.
_REPLACE_INTERVAL_S = 60.0
# One thread: what it hashes has threads of its own. No GPU: a context there takes memory.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A process's answer: the shared memory's first `nbytes` are the block of a SlotImage with these fields.
    `digest` is what the weights say themselves, `slot_layout` what the image says."""

    digest: str
    slot_layout: str
    nbytes: int
    ranks: tuple[int, ...]
    scales: tuple[float, ...]
    error: float


class LayoutWorkers:
    """`image` belongs to loader threads. Processes start at once, and work when they are up."""

    def __init__(self, config: ExecutorConfig, max_block_bytes: int) -> None:
        """Starts as many as the settings say; fewer, in the log, where they cannot be started."""
        self._config = config
        self._max_block_bytes = max_block_bytes
        self._patience_s = config.load_timeout
        self._lock = Lock()
        self._closing = False
        self._next_replacement = 0.0
        self._workers: list[LayoutWorker] = []
        # Last in, first out: who has worked has memory and has verified what comes again.
        self._idle: LifoQueue[LayoutWorker] = LifoQueue()
        try:
            for _ in range(config.num_loader_processes):
                self._workers.append(LayoutWorker(config, max_block_bytes))
                self._idle.put(self._workers[-1])
        except OSError as error:
            logger.error("loader threads lay adapters out themselves, a process cannot be started: %s", error)

    @contextmanager
    def image(self, digest: str, layout: SlotLayout) -> Iterator[SlotImage | None]:
        """In memory that is the next one's afterwards. None: not here, whatever the reason. `layout` is the
        same in all calls."""
        try:
            worker = self._idle.get_nowait()
        except Empty:
            self._replace(digest, layout)
            yield None
            return
        try:
            image = worker.lay_out(digest, layout, self._patience_s)
        except Exception as error:  # It may answer late, or say anything: nothing is read from it any more.
            self._give_up(worker, error)
            yield None
            return
        try:
            yield image
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        with self._lock:
            self._closing = True
        for worker in self._workers:
            worker.kill()

    def _give_up(self, worker: "LayoutWorker", error: Exception) -> None:
        worker.kill()
        with self._lock:
            if not self._closing:
                self._workers.remove(worker)
                logger.error("process %d lays no adapters out any more: %s", worker.pid, repr(error))

    def _replace(self, digest: str, layout: SlotLayout) -> None:
        """One of those that are gone, now that it is missed for this load."""
        with self._lock:
            now = time.monotonic()
            full = len(self._workers) >= self._config.num_loader_processes
            if full or self._closing or now < self._next_replacement:
                return
            self._next_replacement = now + _REPLACE_INTERVAL_S
        Thread(target=self._try_another, args=(digest, layout), name="layout-worker", daemon=True).start()

    def _try_another(self, digest: str, layout: SlotLayout) -> None:
        """No load waits for it: it is idle once it has laid out an adapter for nobody."""
        try:
            worker = LayoutWorker(self._config, self._max_block_bytes)
        except OSError as error:
            logger.error("no process takes the place of one that is gone: %s", error)
            return
        with self._lock:
            self._workers.append(worker)
            if self._closing:
                worker.kill()
        try:
            worker.lay_out(digest, layout, self._patience_s)
        except Exception as error:
            self._give_up(worker, error)
        else:
            self._idle.put(worker)


class LayoutWorker:
    """One process, as it is seen from here. One thread at a time."""

    def __init__(self, config: ExecutorConfig, max_block_bytes: int) -> None:
        """Raises OSError."""
        self._connection, far = Pipe()
        memory = os.memfd_create("lorafleet-image")
        try:
            os.ftruncate(memory, max_block_bytes)  # takes memory where it is written
            self._buffer: Buffer = np.frombuffer(mmap.mmap(memory, max_block_bytes), np.uint8)
            self._process = _start(far, memory)
        finally:
            far.close()  # else its end would go unseen
            os.close(memory)
        self._connection.send(config)
        self._knows_layout = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def lay_out(self, digest: str, layout: SlotLayout, patience_s: float) -> SlotImage | None:
        """Raises all kinds of errors for a process that is gone, hangs or speaks nonsense."""
        if not self._knows_layout:
            self._connection.send(layout)
            self._knows_layout = True
        self._connection.send(digest)
        if not self._connection.poll(patience_s):
            raise TimeoutError(f"no answer for {patience_s:g} s")
        answer = self._connection.recv()
        if answer is None:
            return None
        if not isinstance(answer, LaidOut) or answer.digest != digest:
            raise ValueError(f"no answer to {digest}: {str(answer)[:200]}")
        block = self._buffer[: answer.nbytes]
        if answer.slot_layout != layout.slot_layout or len(block) != answer.nbytes:
            raise ValueError(f"an image of {answer.nbytes} bytes for another layout")
        return SlotImage(
            answer.slot_layout, torch.from_numpy(block), answer.ranks, answer.scales, answer.error
        )

    def kill(self) -> None:
        """At once, on any thread: it only reads, and stores are made for readers that end anywhere."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_GRACE_S)


def _start(far: Connection, memory: int) -> "subprocess.Popen[bytes]":
    """Standard output may be a protocol of this process; standard error is for the logs of both."""
    numbers = (far.fileno(), memory)
    # A process starts with what is blocked here: what a terminal or a container sends to all is for the
    # executor, which drains first.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        return subprocess.Popen(
            (sys.executable, "-m", "executor.adapters.layout_process", *map(str, numbers)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=os.environ | _ENVIRONMENT,
            pass_fds=numbers,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
