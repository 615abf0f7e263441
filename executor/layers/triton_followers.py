"""The followers as Triton kernels, with an adapter's delta inside or without. Needs triton."""

from collections.abc import Sequence

import torch
from torch import Tensor

from executor.layers.activation import Activation
from executor.layers.followers import TORCH_FOLLOWERS, Follower, FusedForm, Heads, Rotation
from executor.layers.norm import Norm, RMSNorm
from executor.layers.rotary import RotaryEmbedding
from kernels.launching.follower import PagedCache
from kernels.lora_expand_add_rms_norm import MAX_HIDDEN, add_rms_norm, lora_expand_add_rms_norm
from kernels.lora_expand_rope import HEAD_DIMS, lora_expand_rope, rope
from kernels.lora_expand_silu_mul import lora_expand_silu_mul, silu_mul
from kernels.metadata.meta import LoRAKernelMeta


class TritonFollowers:
    """What the kernels do not serve (rows wider than 8192, other head sizes, heads turned in part or
    interleaved, norms of outputs, other norms and activations) takes plain torch."""

    def gated(self, activation: Activation) -> Follower:
        if activation != "silu":
            return TORCH_FOLLOWERS.gated(activation)
        return Follower(_silu_mul, FusedForm("silu_mul", 2, _fused_silu_mul))

    def gelu(self) -> Follower:
        return TORCH_FOLLOWERS.gelu()

    def add_norm(self, residual: Tensor, norm: Norm | None, own: Norm | None = None) -> Follower:
        wide = residual.shape[1] > MAX_HIDDEN
        if norm is None or type(norm) is not RMSNorm or own is not None or wide:
            return TORCH_FOLLOWERS.add_norm(residual, norm, own)

        def plain(y: Tensor) -> Tensor:
            out = torch.empty_like(residual)
            add_rms_norm(out, residual, y, norm.weight, norm.eps)
            return out

        def fused(
            y: Tensor, h: Tensor, lora_b: Sequence[Tensor], ranks: Tensor, meta: LoRAKernelMeta
        ) -> Tensor:
            out = torch.empty_like(residual)
            lora_expand_add_rms_norm(out, residual, y, h, lora_b[0], ranks, norm.weight, norm.eps, meta)
            return out

        return Follower(plain, FusedForm("add_rms_norm", 1, fused))

    def rotation(self, embedding: RotaryEmbedding, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """[rows, planes] float32: the kernel turns in float32, whatever q's dtype. As torch's if it does not
        serve the model."""
        whole = 2 * len(embedding.inv_freq) == embedding.head_dim
        if whole and not embedding.interleaved and embedding.head_dim in HEAD_DIMS:
            return embedding.by_plane(positions)
        return TORCH_FOLLOWERS.rotation(embedding, positions, dtype)

    def rotate(self, heads: Heads, rotation: Rotation, cache: Tensor, kv_slots: Tensor) -> Follower:
        cos, sin = rotation
        if cos.dim() != 2:
            return TORCH_FOLLOWERS.rotate(heads, rotation, cache, kv_slots)
        paged = PagedCache(cache, kv_slots)

        def plain(y: Tensor) -> Tensor:
            _norm_heads(y, heads)
            rope(y, cos, sin, heads.sizes[1], paged)
            return heads.split(y)[0]

        def fused(
            y: Tensor, h: Tensor, lora_b: Sequence[Tensor], ranks: Tensor, meta: LoRAKernelMeta
        ) -> Tensor:
            lora_expand_rope(y, h, lora_b, ranks, cos, sin, meta, paged)
            return heads.split(y)[0]

        # The norms come between delta and rotation.
        return Follower(plain, None if heads.q_norm else FusedForm("rope", 3, fused))


def _silu_mul(y: Tensor) -> Tensor:
    out = y.new_empty(len(y), y.shape[1] // 2)
    silu_mul(out, y)
    return out


def _fused_silu_mul(
    y: Tensor, h: Tensor, lora_b: Sequence[Tensor], ranks: Tensor, meta: LoRAKernelMeta
) -> Tensor:
    out = y.new_empty(len(y), y.shape[1] // 2)
    lora_expand_silu_mul(out, y, h, lora_b, ranks, meta)
    return out


def _norm_heads(y: Tensor, heads: Heads) -> None:
    """In place, for q and k."""
    if heads.q_norm is None or heads.k_norm is None:
        return
    q, k, _ = heads.split(y)
    q.copy_(heads.q_norm(q))
    k.copy_(heads.k_norm(k))
