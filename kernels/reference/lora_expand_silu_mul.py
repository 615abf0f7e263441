"""The gate_up layer's expand followed by SiLU-and-multiply."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from kernels.launching.follower import check_silu_mul
from kernels.metadata.meta import LoRAKernelMeta
from kernels.reference.lora_expand import lora_expand


def lora_expand_silu_mul(
    out: Tensor, y: Tensor, h: Tensor, lora_b: Sequence[Tensor], ranks: Tensor, meta: LoRAKernelMeta
) -> None:
    """Semantics: out[row(p)] = silu(y[row(p), :n] + d[0, p]) * (y[row(p), n:] + d[1, p]).

    d[s, p] = h[s, p, :r] @ lora_b[s][slot, :r], 0 for base rows.
    p is a place of the sorted order, row(p) = token_indices_sorted_by_lora_ids[p], slot that row's slot,
    r = ranks[s, slot].

    out     [rows, n], of y's dtype, overwritten
    y       floating [rows, 2n]: the base layer's output, gate then up; only read
    h       float32 [2, rows, max_rank], from lora_shrink
    lora_b  gate's and up's rank-major B, [max_loras, max_rank, n]; a row >= r is never read
    ranks   int32 [2, max_loras]; 0: the slot has no such module

    All in float32, rounded once. Raises KernelArgumentError.
    """
    check_silu_mul(out, y, h, lora_b, ranks, meta)
    width = out.shape[1]
    whole = y.float() if y.element_size() < 4 else y.clone()
    lora_expand(whole, h, lora_b, ranks, (0, width), meta)
    out.copy_(F.silu(whole[:, :width]) * whole[:, width:])
