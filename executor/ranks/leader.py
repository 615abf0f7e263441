"""The other ranks, as rank 0 sees them: started, told, watched, ended."""

import logging
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeVar

import torch

from executor.config import ExecutorConfig
from executor.distributed import ParallelGroup, connect, disconnect
from executor.errors import RankLost, StartError
from executor.ranks.messages import Answer, Control, Done, Failed, Hello, Ready, RunStep, StartFailed
from executor.ranks.worker import run_rank
from executor.step.inputs import SequenceRows

END_GRACE_S = 5.0
END_SEEN_S = 1.0

Message = TypeVar("Message", Hello, Ready)

logger = logging.getLogger(__name__)


class Ranks:
    """Ranks 1 to n - 1. Made by `start_ranks`; one thread calls the methods, another may use `lanes`.

    A rank that ends by itself, or does not answer in time, takes the group down: all are killed, `lost` is
    called with a RankLost (on a thread of its own), and every method raises one.
    """

    def __init__(
        self,
        processes: Sequence[SpawnProcess],
        controls: Sequence[Connection],
        lanes: Sequence[Sequence[Connection]],
        meeting: "tempfile.TemporaryDirectory[str]",
        config: ExecutorConfig,
        lost: Callable[[Exception], None],
    ) -> None:
        self._meeting = meeting
        self._config = config
        self._processes = processes
        self._sentinels = [process.sentinel for process in processes]
        self._controls = controls
        self._lost = lost
        self._closing = False
        self.lanes = lanes  # each one connection a rank
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()

    def wait_ready(self, own_s: float) -> int:
        """Until all have loaded their shares, which took this rank `own_s` seconds; returns the bytes of a
        slot on all. StartError, RankLost."""
        patience = own_s + self._config.start_timeout
        return sum(self._expect(control, Ready, patience).nbytes_per_slot for control in self._controls)

    def wait_hello(self) -> None:
        for control in self._controls:
            self._expect(control, Hello, self._config.start_timeout)

    @contextmanager
    def step(self, sequences: tuple[SequenceRows, ...]) -> Iterator[None]:
        """Let the others run this step; within, this rank does. When it fails the ranks are no longer at the
        same place, so that whatever it raises becomes RankLost."""
        self.tell(RunStep(sequences))
        try:
            yield
        except Exception as error:
            raise self._gone("a step failed on this rank, or another rank left it") from error

    def tell(self, message: Control) -> None:
        data = ForkingPickler.dumps(message)  # once for all
        try:
            for control in self._controls:
                control.send_bytes(data)
        except OSError as error:
            raise self._gone("a rank has closed its connection") from error

    def answers(self) -> list[Answer]:
        """One from each rank, to what was told last."""
        return self.receive(self._controls, self._config.step_timeout)

    def receive(self, connections: Sequence[Connection], patience_s: float) -> list[Answer]:
        """One answer from each, within `patience_s` after the one before; all are read, whatever they say."""
        try:
            return [self._receive(connection, patience_s) for connection in connections]
        except (EOFError, OSError) as error:
            raise self._gone("a rank has closed its connection") from error

    def _receive(self, connection: Connection, patience_s: float) -> Any:
        if not connection.poll(patience_s):
            for process in self._processes:
                process.kill()  # which `_watch` sees
            raise RankLost(f"a rank has not answered for {patience_s:g} s")
        return connection.recv()

    def close(self) -> None:
        """End the others, as soon as they have done what they were told. Safe to call twice."""
        self._closing = True
        for connection in (*self._controls, *(each for lane in self.lanes for each in lane)):
            connection.close()
        # NCCL lets no rank go before all leave; over gloo others may still read what this rank sent last.
        together = self._config.device != "cpu"
        if together:
            disconnect()
        for process in self._processes:
            process.join(END_GRACE_S)
            process.kill()
            process.join(END_GRACE_S)
        if not together:
            disconnect()
        self._meeting.cleanup()

    def _expect(self, control: Connection, kind: type[Message], patience_s: float) -> Message:
        try:
            message = self._receive(control, patience_s)
        except (EOFError, OSError) as error:
            raise RankLost("a rank ended while it started; its log says why") from error
        if isinstance(message, StartFailed):
            raise StartError(f"a rank cannot start: {message.message}")
        if not isinstance(message, kind):
            raise RuntimeError(f"{message!r} is not the {kind.__name__} that was due")
        return message

    def _watch(self) -> None:
        wait(self._sentinels)
        if self._closing:
            return
        end = self._end()
        for process in self._processes:
            process.kill()
        logger.error("%s; the executor ends with it", end)
        self._lost(RankLost(end))

    def _gone(self, otherwise: str) -> RankLost:
        """A rank's end breaks what it was part of a moment before it is seen itself."""
        return RankLost(self._end() if wait(self._sentinels, END_SEEN_S) else otherwise)

    def _end(self) -> str:
        codes = [process.exitcode for process in self._processes]
        return f"a rank has ended (exit codes of ranks 1 on: {codes})"


def start_ranks(config: ExecutorConfig, lost: Callable[[Exception], None]) -> tuple[Ranks, ParallelGroup]:
    """The processes of all other ranks, and the group they form with this one. StartError, RankLost."""
    _check_gpus(config)
    context = get_context("spawn")
    others = range(1, config.tensor_parallel_size)
    controls = [context.Pipe() for _ in others]
    lanes = [[context.Pipe() for _ in others] for _ in range(config.loader_threads)]
    # There until the end: a rank may look up others in it later than rank 0 has found them.
    folder = tempfile.TemporaryDirectory(prefix="lorafleet-ranks-")
    meeting = Path(folder.name) / "meeting"
    processes = []
    for rank in others:
        far_lanes = [lane[rank - 1][1] for lane in lanes]
        arguments = (config, rank, meeting, controls[rank - 1][1], far_lanes)
        process = context.Process(target=run_rank, args=arguments, name=f"rank-{rank}", daemon=True)
        process.start()
        processes.append(process)
    # The far ends belong to the others: while this process has them, their end goes unseen.
    for _, far in (*controls, *(pair for lane in lanes for pair in lane)):
        far.close()
    near_lanes = [[near for near, _ in lane] for lane in lanes]
    ranks = Ranks(processes, [near for near, _ in controls], near_lanes, folder, config, lost)
    try:
        ranks.wait_hello()
        try:
            group = connect(0, config.tensor_parallel_size, meeting, config.device, config.step_timeout)
        except RuntimeError as error:
            raise RankLost("the ranks have not met") from error
    except BaseException:
        ranks.close()
        raise
    return ranks, group


def _check_gpus(config: ExecutorConfig) -> None:
    """Before there is anything to wait for or to end."""
    size = config.tensor_parallel_size
    if config.device != "cpu" and (found := torch.cuda.device_count()) < size:
        raise StartError(f"--tensor-parallel-size {size} needs a GPU for each rank, there are {found}")


def kill_ranks() -> None:
    """Those that this process started, also one that is stopped. For the end of a process whose threads may
    still wait for them."""
    for child in active_children():
        child.kill()


def failure_in(answers: Sequence[Answer]) -> Failed | None:
    return next((answer for answer in answers if isinstance(answer, Failed)), None)


def total_bytes(answers: Sequence[Answer]) -> int:
    return sum(answer.nbytes for answer in answers if isinstance(answer, Done))
