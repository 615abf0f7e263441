"""The qkv layer's expand, then the rotation of q and k, and the write of k and v into a paged cache."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.launching.follower import PagedCache, check_cache, check_rope
from kernels.metadata.meta import LoRAKernelMeta
from kernels.reference.lora_expand import lora_expand


def lora_expand_rope(
    y: Tensor,
    h: Tensor,
    lora_b: Sequence[Tensor],
    ranks: Tensor,
    cos: Tensor,
    sin: Tensor,
    meta: LoRAKernelMeta,
    cache: PagedCache | None = None,
) -> None:
    """Semantics: z = y[row(p)] + [h[s, p, :r] @ B_s[slot, :r] for s]; q and k of z are turned; y[row(p)] = z.

    p is a place of the sorted order, row(p) = token_indices_sorted_by_lora_ids[p], slot that row's slot,
    r = ranks[s, slot]; the delta is 0 for base rows. The columns (i, i + m) of every head of q and k, m being
    half the head, turn from (a, b) to (a cos_i - b sin_i, b cos_i + a sin_i).

    y         floating [rows, q + k + v columns]: the base layer's output, changed in place
    h         float32 [3, rows, max_rank], from lora_shrink
    lora_b    q's, k's and v's rank-major B, [max_loras, max_rank, out_s]; a row >= r is never read
    ranks     int32 [3, max_loras]; 0: the slot has no such module
    cos, sin  floating [rows, head_dim / 2]: each row's own position
    cache     k and v go there, at their kv_slots, and y's columns of k and v keep the base's output

    All in float32, rounded once. Raises KernelArgumentError.
    """
    check_rope(y, h, lora_b, ranks, cos, sin, meta)
    widths = [weight.shape[2] for weight in lora_b]
    whole = y.float() if y.element_size() < 4 else y.clone()
    lora_expand(whole, h, lora_b, ranks, (0, widths[0], widths[0] + widths[1]), meta)
    q, k, v = torch.split(whole, widths, dim=1)
    q, k = _turned(q, cos, sin), _turned(k, cos, sin)
    if cache is None:
        y.copy_(torch.cat((q, k, v), dim=1))
        return
    head_dim = 2 * cos.shape[1]
    check_cache(cache, y, widths[1] // head_dim, head_dim)
    y[:, : widths[0]] = q
    rows = cache.kv_slots >= 0
    for plane, values in zip(cache.data.flatten(1, 2), (k, v), strict=True):
        plane[cache.kv_slots[rows]] = values[rows].view(-1, plane.shape[1], head_dim).to(y.dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[1]
    pairs = x.reshape(len(x), x.shape[1] // (2 * half), 2, half)
    first, second = pairs[:, :, 0], pairs[:, :, 1]
    c, s = cos.float()[:, None], sin.float()[:, None]
    return torch.stack((first * c - second * s, second * c + first * s), dim=2).flatten(1)
