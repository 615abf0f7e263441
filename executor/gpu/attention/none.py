"""A stand-in for attention, for steps that only launch all their other kernels, to compile them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from executor.gpu.attention.planner import Kind
from executor.layers.attention import LayerCache
from executor.step.buffers import StepBuffers, StepShape


@dataclass(frozen=True, slots=True)
class UnattendedStep:
    """A PlannedStep. What it leaves means nothing."""

    kv_slots: Tensor

    def attend(self, query: Tensor, cache: LayerCache, sinks: Tensor | None = None) -> Tensor:
        return torch.zeros_like(query, memory_format=torch.contiguous_format)

    def attend_into(self, out: Tensor, query: Tensor, cache: LayerCache, sinks: Tensor | None = None) -> None:
        pass


class NoAttention:
    """A StepPlanner."""

    def plan(
        self, shape: StepShape, buffers: StepBuffers, kv_slots: Tensor, block_size: int, kind: Kind
    ) -> UnattendedStep:
        return UnattendedStep(kv_slots)
