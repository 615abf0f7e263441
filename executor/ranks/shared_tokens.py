"""A step's last tokens on every rank: drawn by rank 0 alone, perhaps in a step that still runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from executor.distributed import ParallelGroup
from executor.step.forward_pass import ForwardPass
from executor.step.inputs import SequenceRows
from executor.step.trace import NO_TRACE, Trace


@dataclass(frozen=True, slots=True)
class SharedTokensPass:
    """A ForwardPass. `run` needs `last_tokens` on every rank, of one shape; those of rank 0 overwrite the
    others' where a sequence needs one. They travel behind the step that draws them, so nobody waits."""

    inner: ForwardPass
    group: ParallelGroup

    def warm_up(self) -> None:
        self.inner.warm_up()

    def close(self) -> None:
        self.inner.close()

    def run(
        self, sequences: Sequence[SequenceRows], last_tokens: Tensor | None = None, trace: Trace = NO_TRACE
    ) -> Tensor:
        if last_tokens is not None and any(sequence.pending >= 0 for sequence in sequences):
            self.group.broadcast(last_tokens)
        return self.inner.run(sequences, last_tokens, trace)
