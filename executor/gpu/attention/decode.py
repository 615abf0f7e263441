"""Attention of captured decode steps: one row a sequence, nothing planned on the host. Needs triton."""

from dataclasses import dataclass

import torch
from torch import Tensor

from executor.layers.attention import LayerCache
from executor.step.buffers import StepBuffers
from kernels.paged_decode import paged_decode


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A StepAttention that reads the step's tables when its kernels run, so that a capture of it is right for
    every step of as many rows."""

    kv_slots: Tensor
    kv_indices: Tensor
    kv_indptr: Tensor
    last_page_len: Tensor

    @classmethod
    def of(cls, buffers: StepBuffers, rows: int) -> "DecodeStep":
        return cls(
            buffers.kv_slots[:rows],
            buffers.kv_indices,
            buffers.kv_indptr[: rows + 1],
            buffers.last_page_len[:rows],
        )

    def attend(self, query: Tensor, cache: LayerCache, sinks: Tensor | None = None) -> Tensor:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        tables = self.kv_indices, self.kv_indptr, self.last_page_len
        paged_decode(out, query, cache.data, *tables, cache.window, sinks=sinks)
        return out
