"""The other ranks, as rank 0 sees them: started, told, watched, ended."""

import logging
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TypeVar

from executor.config import ExecutorConfig
from executor.distributed import ParallelGroup, connect, disconnect
from executor.errors import RankLost, StartError
from executor.forward import SequenceRows
from executor.ranks.messages import Answer, Control, Done, Failed, Hello, Ready, RunStep, StartFailed
from executor.ranks.worker import run_rank

END_GRACE_S = 5.0

Message = TypeVar("Message", Hello, Ready)

logger = logging.getLogger(__name__)


class Ranks:
    """Ranks 1 to n - 1. Made by `start_ranks`; one thread calls the methods, another may use `lanes`.

    A rank that ends by itself takes the group down: the others are killed, `lost` is called with a RankLost
    (on a thread of its own), and every method raises one.
    """

    def __init__(
        self,
        processes: Sequence[SpawnProcess],
        controls: Sequence[Connection],
        lanes: Sequence[Sequence[Connection]],
        meeting: "tempfile.TemporaryDirectory[str]",
        lost: Callable[[Exception], None],
    ) -> None:
        self._meeting = meeting
        self._processes = processes
        self._controls = controls
        self._lost = lost
        self._closing = False
        self.lanes = lanes  # each one connection a rank
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()

    def wait_ready(self) -> int:
        """Until all have loaded their shares; returns the bytes of a slot on all. StartError, RankLost."""
        return sum(self._expect(control, Ready).nbytes_per_slot for control in self._controls)

    def wait_hello(self) -> None:
        for control in self._controls:
            self._expect(control, Hello)

    @contextmanager
    def step(self, sequences: tuple[SequenceRows, ...]) -> Iterator[None]:
        """Let the others run this step; within, this rank does. When it fails the ranks are no longer at the
        same place, so that whatever it raises becomes RankLost."""
        self.tell(RunStep(sequences))
        try:
            yield
        except Exception as error:
            raise RankLost("a step failed on this rank, or another rank left it") from error

    def tell(self, message: Control) -> None:
        data = ForkingPickler.dumps(message)  # once for all
        try:
            for control in self._controls:
                control.send_bytes(data)
        except OSError as error:
            raise RankLost("a rank is gone") from error

    def answers(self) -> list[Answer]:
        """One from each rank, to what was told last."""
        return receive(self._controls)

    def close(self) -> None:
        """End the others, as soon as they have done what they were told. Safe to call twice."""
        self._closing = True
        for connection in (*self._controls, *(each for lane in self.lanes for each in lane)):
            connection.close()
        for process in self._processes:
            process.join(END_GRACE_S)
            process.kill()
        disconnect()
        self._meeting.cleanup()

    def _expect(self, control: Connection, kind: type[Message]) -> Message:
        try:
            message = control.recv()
        except (EOFError, OSError) as error:
            raise RankLost("a rank ended while it started; its log says why") from error
        if isinstance(message, StartFailed):
            raise StartError(f"a rank cannot start: {message.message}")
        if not isinstance(message, kind):
            raise RuntimeError(f"{message!r} is not the {kind.__name__} that was due")
        return message

    def _watch(self) -> None:
        wait([process.sentinel for process in self._processes])
        if self._closing:
            return
        for process in self._processes:
            process.kill()
        codes = [process.exitcode for process in self._processes]
        logger.error("a rank has ended; the executor ends with it (exit codes of ranks 1 on: %s)", codes)
        self._lost(RankLost("a rank has ended"))


def start_ranks(config: ExecutorConfig, lost: Callable[[Exception], None]) -> tuple[Ranks, ParallelGroup]:
    """The processes of all other ranks, and the group they form with this one. StartError, RankLost."""
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
    ranks = Ranks(processes, [near for near, _ in controls], near_lanes, folder, lost)
    try:
        ranks.wait_hello()
        group = connect(0, config.tensor_parallel_size, meeting, config.device, config.step_timeout)
    except BaseException:
        ranks.close()
        raise
    return ranks, group


def receive(connections: Sequence[Connection]) -> list[Answer]:
    """One answer from each; all are read, whatever they say. RankLost."""
    try:
        return [connection.recv() for connection in connections]
    except (EOFError, OSError) as error:
        raise RankLost("a rank is gone") from error


def failure_in(answers: Sequence[Answer]) -> Failed | None:
    return next((answer for answer in answers if isinstance(answer, Failed)), None)


def total_bytes(answers: Sequence[Answer]) -> int:
    return sum(answer.nbytes for answer in answers if isinstance(answer, Done))
