"""The GPU's forward pass on a CPU: kernels are interpreted, a "captured" step runs again at each replay, and
attention is computed from the step's buffers by the definition, one sequence at a time."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.attention import KVCache, LayerCache
from executor.cuda_graphs import Capture, Captured
from executor.flashinfer_attention import Kind
from executor.step_buffers import StepBuffers, StepShape


class RerunMemory:
    """In GraphMemory's place. Parts of a piecewise capture run as one, with their calls where they stand."""

    def capture(self, run: Callable[[Capture], Tensor]) -> Captured:
        rerun = _Rerun()
        out = run(rerun)
        return Captured((lambda: out.copy_(run(rerun)),), out)


class _Rerun(Capture):
    def __init__(self) -> None:
        super().__init__(None)

    def call_between(self, call: Callable[[], object]) -> None:
        call()


class BufferAttention:
    """In FlashInfer's place."""

    def plan(
        self, shape: StepShape, buffers: StepBuffers, kv_slots: Tensor, block_size: int, kind: Kind
    ) -> "BufferStep":
        assert kind != "captured" or (shape.qo_indptr == range(len(shape.qo_indptr))).all()
        return BufferStep(kv_slots, buffers, len(shape.kv_lens), block_size)


@dataclass(frozen=True)
class BufferStep:
    """Reads the buffers when it runs, as a replayed kernel does."""

    kv_slots: Tensor
    buffers: StepBuffers
    sequences: int
    block_size: int

    def attend(self, query: Tensor, cache: LayerCache) -> Tensor:
        out = torch.full_like(query, float("nan"), memory_format=torch.contiguous_format)
        self.attend_into(out, query, cache)
        return out

    def attend_into(self, out: Tensor, query: Tensor, cache: LayerCache) -> None:
        buffers = self.buffers
        for number in range(self.sequences):
            first, last = buffers.qo_indptr[number : number + 2].tolist()
            start, end = buffers.kv_indptr[number : number + 2].tolist()
            pages = buffers.kv_indices[start:end].long()
            length = (end - start - 1) * self.block_size + int(buffers.last_page_len[number])
            k, v = cache.data[:, pages].flatten(1, 2)[:, :length].transpose(1, 2)
            visible = torch.arange(length) - torch.arange(length - last + first, length)[:, None]
            mask = visible <= 0 if cache.window is None else (visible <= 0) & (visible > -cache.window)
            q = query[first:last].transpose(0, 1)
            y = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, enable_gqa=True)
            out[first:last] = y[0].transpose(0, 1)
