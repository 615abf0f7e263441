"""The interface of attention on a GPU: a step is planned on the host, then run in each layer."""

from typing import Literal, Protocol

from torch import Tensor

from executor.layers.attention import LayerCache, StepAttention
from executor.step.buffers import StepBuffers, StepShape

# rows: for few rows a sequence (FlashAttention 2: a KV head's query heads share a tile); prefill: for many
# (FlashAttention 3).
Kind = Literal["rows", "prefill"]


class PlannedStep(StepAttention, Protocol):
    """Attention of a step that is planned on the host, for steps whose pieces are captured without it."""

    def attend_into(self, out: Tensor, query: Tensor, cache: LayerCache, sinks: Tensor | None = None) -> None:
        """Does what `attend` does; rows that fill the step up are left alone."""
        ...


class StepPlanner(Protocol):
    def plan(
        self, shape: StepShape, buffers: StepBuffers, kv_slots: Tensor, block_size: int, kind: Kind
    ) -> PlannedStep:
        """The plan for the step in `buffers`, whose rows (and what fills them up) write to `kv_slots`. Valid
        until the next call; waits for nothing on the device."""
        ...
