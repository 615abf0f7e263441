"""The o and down layers' expand followed by residual-add and RMSNorm."""

import torch
from torch import Tensor

from kernels.launching.follower import check_add_rms_norm
from kernels.metadata.meta import LoRAKernelMeta
from kernels.reference.lora_expand import lora_expand


def lora_expand_add_rms_norm(
    out: Tensor,
    residual: Tensor,
    y: Tensor,
    h: Tensor,
    lora_b: Tensor,
    ranks: Tensor,
    weight: Tensor,
    eps: float,
    meta: LoRAKernelMeta,
) -> None:
    """Semantics: residual[row(p)] += y[row(p)] + h[0, p, :r] @ lora_b[slot, :r]; out = norm(residual).

    p is a place of the sorted order, row(p) = token_indices_sorted_by_lora_ids[p], slot that row's slot,
    r = ranks[0, slot]; base rows have no product. norm(z) = z / sqrt(mean(z^2) + eps) * weight, row by row.

    out       [rows, hidden], as y, overwritten
    residual  [rows, hidden], as y, changed in place
    y         floating [rows, hidden]: the base layer's output; only read
    h         float32 [1, rows, max_rank], from lora_shrink
    lora_b    rank-major [max_loras, max_rank, hidden]; a row >= r is never read
    ranks     int32 [1, max_loras]; 0: the slot has no such module
    weight    [hidden], as y

    The residual's sum is formed in float32 and rounded once; the normalised row is rounded before it meets
    the weight. Raises KernelArgumentError.
    """
    check_add_rms_norm(out, residual, y, h, lora_b, ranks, weight, meta)
    total = y.float() + residual.float()
    lora_expand(total, h, (lora_b,), ranks, (0,), meta)
    residual.copy_(total)
    wide = residual.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    out.copy_(weight * (wide * scale).to(y.dtype))
