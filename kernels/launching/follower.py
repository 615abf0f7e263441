"""What the launchers of the fused followers share: which entries they launch, and what they refuse."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.launching.checks import check, check_expand, check_launchable, check_rows, check_same_device
from kernels.metadata.launch_plan import ROWS_PER_TILE
from kernels.metadata.meta import LoRAKernelMeta


@dataclass(frozen=True, slots=True)
class Entries:
    """All rows of a step as one list: `listed` entries of `work`, then as many as hold the base rows."""

    work: Tensor
    listed: int
    total: int

    @classmethod
    def of(cls, meta: LoRAKernelMeta, entry_rows: int) -> "Entries":
        tiled = entry_rows == ROWS_PER_TILE and meta.plan.tiles > 0
        given = ROWS_PER_TILE if tiled else meta.plan.rows_per_item
        check(entry_rows == given, "config", f"is for entries of {entry_rows} rows, the step's have {given}")
        work, listed = (meta.tiles, meta.plan.tiles) if tiled else (meta.items, meta.plan.items)
        return cls(work, listed, listed + -(-meta.plan.base_rows // entry_rows))


@dataclass(frozen=True, slots=True)
class PagedCache:
    """Where a step's keys and values go.

    data      [2, blocks, block_size, kv_heads, head_dim], keys then values; each of the two contiguous
    kv_slots  int64 [rows]: block * block_size + offset in the block; a negative one writes nothing
    """

    data: Tensor
    kv_slots: Tensor


def check_like(tensor: Tensor, argument: str, other: Tensor, other_name: str) -> None:
    if tensor.shape != other.shape or tensor.dtype != other.dtype or tensor.device != other.device:
        raise KernelArgumentError(
            argument,
            f"must be as {other_name} ({other.dtype} {list(other.shape)} on {other.device}), is "
            f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}",
        )


def check_silu_mul(
    out: Tensor, y: Tensor, h: Tensor, lora_b: Sequence[Tensor], ranks: Tensor, meta: LoRAKernelMeta
) -> None:
    check(len(lora_b) == 2, "lora_b", f"must hold gate and up, holds {len(lora_b)} slices")
    check_expand(y, h, lora_b, ranks, _two_halves(y), meta, None)
    for index, weight in enumerate(lora_b):
        if 2 * weight.shape[2] != y.shape[1]:
            raise KernelArgumentError(f"lora_b[{index}]", f"is not half as wide as y's {y.shape[1]} columns")
    check_like(out, "out", y[:, : y.shape[1] // 2], "half of y")


def check_add_rms_norm(
    out: Tensor,
    residual: Tensor,
    y: Tensor,
    h: Tensor,
    lora_b: Tensor,
    ranks: Tensor,
    weight: Tensor,
    meta: LoRAKernelMeta,
) -> None:
    check(lora_b.dim() == 3, "lora_b", "must be [max_loras, max_rank, hidden]")
    check_expand(y, h, (lora_b,), ranks, (0,), meta, None)
    check(lora_b.shape[2] == y.shape[1], "lora_b", f"has not the width of y, {y.shape[1]}")
    check_like(residual, "residual", y, "y")
    check_like(out, "out", y, "y")
    check_like(weight, "weight", y[0] if len(y) else y.new_empty(y.shape[1]), "a row of y")


def check_rope(
    y: Tensor,
    h: Tensor,
    lora_b: Sequence[Tensor],
    ranks: Tensor,
    cos: Tensor,
    sin: Tensor,
    meta: LoRAKernelMeta,
) -> int:
    """Returns the head dimension."""
    check(len(lora_b) == 3, "lora_b", f"must hold q, k and v, holds {len(lora_b)} slices")
    check(all(b.dim() == 3 for b in lora_b), "lora_b", "must hold slices [max_loras, max_rank, out]")
    q, k, v = (weight.shape[2] for weight in lora_b)
    check_expand(y, h, lora_b, ranks, (0, q, q + k), meta, None)
    check(q + k + v == y.shape[1], "lora_b", f"has {q + k + v} columns in all, y {y.shape[1]}")
    check_rows(cos, "cos", meta)
    check(cos.dim() == 2 and cos.is_floating_point(), "cos", "must be a floating [rows, head_dim / 2]")
    check_like(sin, "sin", cos, "cos")
    check_same_device(y.device, cos=cos)
    head_dim = 2 * cos.shape[1]
    check(k == v, "lora_b", "has k and v of different widths")
    check(q % head_dim == 0 and k % head_dim == 0, "cos", f"makes heads of {head_dim} columns, y has others")
    return head_dim


def check_rotation(y: Tensor, cos: Tensor, sin: Tensor, cache: PagedCache | None, k_width: int) -> None:
    """What the Triton kernel asks beyond the reference."""
    head_dim = 2 * cos.shape[1]
    known = head_dim in (16, 32, 64, 128, 256)
    check(known, "cos", f"makes heads of {head_dim} columns, which the kernel does not serve")
    check(sin.stride(0) == cos.stride(0), "sin", "must have the stride of cos")
    if cache is not None:
        check_cache(cache, y, k_width // head_dim, head_dim)


def check_cache(cache: PagedCache, y: Tensor, heads: int, head_dim: int) -> None:
    data, slots = cache.data, cache.kv_slots
    fits = data.dim() == 5 and data.shape[0] == 2 and tuple(data.shape[3:]) == (heads, head_dim)
    if not fits or data.dtype != y.dtype:
        expected = f"{y.dtype} [2, blocks, block_size, {heads}, {head_dim}]"
        raise KernelArgumentError("cache.data", f"must be {expected}, is {data.dtype} {list(data.shape)}")
    check(data[0].is_contiguous(), "cache.data", f"must be contiguous within a half: {data.stride()}")
    fits = slots.dtype == torch.int64 and slots.dim() == 1 and len(slots) == len(y) and slots.is_contiguous()
    check(fits, "cache.kv_slots", "must be contiguous int64 [rows]")
    check_same_device(y.device, **{"cache.data": data, "cache.kv_slots": slots})


def check_rows_contiguous(**tensors: Tensor) -> None:
    for argument, tensor in tensors.items():
        check(tensor.stride(-1) == 1, argument, f"must have contiguous rows, has strides {tensor.stride()}")


def check_follower(lora_b: Sequence[Tensor], *, ranks: Tensor, **rows: Tensor) -> None:
    """What the Triton kernels ask beyond the references."""
    check_launchable("lora_b", lora_b, ranks=ranks)
    check_rows_contiguous(**rows)


def _two_halves(y: Tensor) -> tuple[int, int]:
    return (0, y.shape[-1] // 2)
