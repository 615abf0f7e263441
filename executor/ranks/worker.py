"""The process of a rank other than 0, which runs the steps and loads that rank 0 tells it."""

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from adapter_store import AdapterStoreError, WeightsSource
from executor.adapters.slot_writer import WriterInTurn
from executor.adapters.source import open_source
from executor.build_shard import build_shard
from executor.config import ExecutorConfig
from executor.distributed import ParallelGroup, connect, disconnect
from executor.errors import ExecutorError
from executor.lifeline import end_with_executor
from executor.lora.image import SlotImage, build_slot_image
from executor.ranks.messages import (
    Answer,
    ClearSlot,
    Control,
    CopyIntoSlot,
    Done,
    Failed,
    ForgetImage,
    Hello,
    LoadAdapter,
    Ready,
    RunStep,
    StartFailed,
)
from executor.ranks.shared_tokens import SharedTokensPass
from executor.rejection import rejection_of
from executor.step.shard import Shard
from lorafleet.doors.logs import set_up
from lorafleet.garbage import QuietCollector


def run_rank(
    config: ExecutorConfig, rank: int, meeting: Path, control: Connection, lanes: Sequence[Connection]
) -> None:
    """Until rank 0 closes `control` or is gone. What a step raises ends this process, and with it the
    group."""
    # A Ctrl-C goes to every process of the terminal; rank 0 drains first and then ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent()
    set_up(config.log_format, config.log_level)
    control.send(Hello())
    try:
        group = connect(rank, config.tensor_parallel_size, meeting, config.device, config.step_timeout)
        shard = build_shard(config, group)
        worker = Worker(shard, open_source(config), group, config.max_seats)
    except (ExecutorError, AdapterStoreError) as error:
        control.send(StartFailed(str(error)))
        return
    QuietCollector().start()  # all ranks wait in a step for the one that collects
    control.send(Ready(worker.nbytes_per_slot))
    for lane in lanes:
        threading.Thread(target=worker.serve_lane, args=(lane,), name="adapter-lane", daemon=True).start()
    worker.serve(control)
    shard.forward_pass.close()
    disconnect()
    # Not by way of the interpreter's end, which aborts when it meets a thread of torch or of a lane in C++.
    logging.shutdown()
    os._exit(0)


class Worker:
    """`serve` belongs to one thread, each lane to another; they share the images, by ticket."""

    def __init__(self, shard: Shard, store: WeightsSource, group: ParallelGroup, max_seats: int) -> None:
        self._shard = shard
        self._forward_pass = SharedTokensPass(shard.forward_pass, group)
        self._last_tokens = torch.zeros(max_seats, dtype=torch.int64, device=shard.kv_cache.device)
        self._writer = WriterInTurn(shard.arena, shard.punica)
        self._store = store
        self._images: dict[int, SlotImage] = {}

    @property
    def nbytes_per_slot(self) -> int:
        return self._shard.arena.nbytes_per_slot

    def serve(self, control: Connection) -> None:
        message: Control
        for message in _messages(control):
            match message:
                case RunStep(sequences):
                    self._forward_pass.run(sequences, self._last_tokens)
                case CopyIntoSlot():
                    control.send(self._copy(message))
                case ClearSlot(slot):
                    self._shard.arena.clear(slot)
                case ForgetImage(ticket):
                    self._images.pop(ticket, None)

    def serve_lane(self, lane: Connection) -> None:
        message: LoadAdapter | ForgetImage
        for message in _messages(lane):
            match message:
                case LoadAdapter():
                    lane.send(self._load(message))
                case ForgetImage(ticket):
                    self._images.pop(ticket, None)

    def _load(self, message: LoadAdapter) -> Answer:
        try:
            with self._store.open(message.digest) as weights:
                image = build_slot_image(weights, self._shard.arena.layout)
        except Exception as error:
            return Failed(rejection_of(error))
        self._images[message.ticket] = image
        return Done(image.nbytes)

    def _copy(self, message: CopyIntoSlot) -> Answer:
        try:
            self._writer.load(message.slot, self._images[message.ticket])
        except Exception as error:
            return Failed(rejection_of(error))
        return Done()


def _messages(connection: Connection) -> Iterator[Any]:
    """Until the other end is closed."""
    while True:
        try:
            yield connection.recv()
        except EOFError:
            return


def _end_with_parent() -> None:
    """A rank may hang in a collective when rank 0 is killed; nothing it holds outlives the process anyway."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        end_with_executor(parent.sentinel)
