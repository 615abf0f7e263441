"""The GPU's forward pass on a CPU: a "captured" step runs again at each replay, and attention is computed
from the step's buffers by the definition, one sequence at a time."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.gpu.attention.planner import Kind
from executor.gpu.cuda_graphs import Capture, Captured
from executor.layers.attention import LayerCache
from executor.layers.followers import Follower, Heads, Rotation, TorchFollowers
from executor.step.buffers import StepBuffers, StepShape


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
        return BufferStep(kv_slots, buffers, len(shape.kv_lens), block_size)


class SkippingFollowers(TorchFollowers):
    """As the Triton kernels: rows with a negative slot leave the cache alone."""

    def rotate(self, heads: Heads, rotation: Rotation, cache: Tensor, kv_slots: Tensor) -> Follower:
        beyond = torch.full_like(kv_slots, cache.shape[1] * cache.shape[2] - 1)
        slots = torch.where(kv_slots < 0, beyond, kv_slots)

        def plain(y: Tensor) -> Tensor:
            kept = cache[:, -1].clone()  # the spare block
            q = super(SkippingFollowers, self).rotate(heads, rotation, cache, slots).plain(y)
            cache[:, -1] = kept
            return q

        return Follower(plain)


@dataclass(frozen=True)
class BufferStep:
    """Reads the buffers when it runs, as a replayed kernel does."""

    kv_slots: Tensor
    buffers: StepBuffers
    sequences: int
    block_size: int

    @classmethod
    def of(cls, buffers: StepBuffers, rows: int) -> "BufferStep":
        """In DecodeStep's place, for blocks of 4."""
        return cls(buffers.kv_slots[:rows], buffers, rows, 4)

    def attend(self, query: Tensor, cache: LayerCache, sinks: Tensor | None = None) -> Tensor:
        out = torch.full_like(query, float("nan"), memory_format=torch.contiguous_format)
        self.attend_into(out, query, cache, sinks)
        return out

    def attend_into(self, out: Tensor, query: Tensor, cache: LayerCache, sinks: Tensor | None = None) -> None:
        buffers = self.buffers
        for number in range(self.sequences):
            first, last = buffers.qo_indptr[number : number + 2].tolist()
            start, end = buffers.kv_indptr[number : number + 2].tolist()
            pages = buffers.kv_indices[start:end].long()
            length = (end - start - 1) * self.block_size + int(buffers.last_page_len[number])
            k, v = cache.data[:, pages].flatten(1, 2)[:, :length].transpose(1, 2)
            visible = torch.arange(length) - torch.arange(length - last + first, length)[:, None]
            mask = visible <= 0 if cache.window is None else (visible <= 0) & (visible > -cache.window)
            if sinks is not None:
                raise ValueError("this stand-in has no attention sinks")
            q = query[first:last].transpose(0, 1)
            y = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, enable_gqa=True)
            out[first:last] = y[0].transpose(0, 1)
