"""FP8 weights of LoRA: scales, checks and quantization. e4m3 (sm_89 and up) or e5m2."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.launching.checks import check, check_same_device

# The largest finite value.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
# FP8 rows of h have a scale for so many ranks: what one FP8 matrix instruction contracts.
RANKS_PER_SCALE = 32


def is_fp8(tensor: Tensor) -> bool:
    return tensor.dtype in LARGEST


def quantized(weight: Tensor, dtype: torch.dtype, group: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """(FP8 values as `weight`, float32 scales): values * scales is nearest to weight [..., rows, columns].

    group says how many rows and columns share a scale, 0: all of them. The scales are [..., row groups,
    column groups]. A group of zeros has scale 1. NaN and inf are kept as they are: check before.
    """
    rows, columns = _group_sizes(weight.shape[-2:], group)
    padded = torch.nn.functional.pad(
        weight.float(), (0, -weight.shape[-1] % columns, 0, -weight.shape[-2] % rows)
    )
    groups = padded.shape[-2] // rows, padded.shape[-1] // columns
    tiles = padded.reshape(*weight.shape[:-2], groups[0], rows, groups[1], columns)
    largest = tiles.abs().amax((-3, -1))
    scales = torch.where(largest > 0, largest / LARGEST[dtype], 1.0)
    return (weight.float() / spread(scales, weight.shape[-2:], group)).to(dtype), scales


def spread(scales: Tensor, shape: Sequence[int], group: tuple[int, int]) -> Tensor:
    """A scale for every element of [..., *shape]."""
    rows, columns = _group_sizes(shape, group)
    return scales.repeat_interleave(rows, -2)[..., : shape[-2], :].repeat_interleave(columns, -1)[
        ..., : shape[-1]
    ]


def _group_sizes(shape: Sequence[int], group: tuple[int, int]) -> tuple[int, int]:
    return group[0] or shape[-2], group[1] or shape[-1]


def check_weight_scales(
    scales: Sequence[Tensor], argument: str, stack: Sequence[Tensor], stack_name: str, group: tuple[int, int]
) -> None:
    """One float32 [max_loras, row groups, column groups] a slice, contiguous along the last."""
    check(len(scales) == len(stack), argument, f"holds {len(scales)} slices, {stack_name} {len(stack)}")
    for index, (scale, weight) in enumerate(zip(scales, stack, strict=True)):
        check(
            is_fp8(weight),
            f"{stack_name}[{index}]",
            f"must be float8_e4m3fn or float8_e5m2, is {weight.dtype}",
        )
        rows, columns = _group_sizes(weight.shape, group)
        expected = (weight.shape[0], -(-weight.shape[1] // rows), -(-weight.shape[2] // columns))
        if tuple(scale.shape) != expected or scale.dtype != torch.float32 or scale.stride(2) != 1:
            wanted = (
                f"must be float32 {list(expected)} [max_loras, row groups, column groups], rows contiguous"
            )
            raise KernelArgumentError(
                f"{argument}[{index}]", f"{wanted}; is {scale.dtype} {list(scale.shape)}"
            )
    check_same_device(stack[0].device, **{argument: scales[0]})


def check_row_scales(
    scales: Tensor | None, argument: str, values: Tensor, name: str, shape: Sequence[int]
) -> None:
    """FP8 values have float32 scales of that shape, others none."""
    check(is_fp8(values) == (scales is not None), argument, f"must be given if and only if {name} is FP8")
    if scales is not None:
        fits = list(scales.shape) == list(shape) and scales.dtype == torch.float32 and scales.is_contiguous()
        check(
            fits,
            argument,
            f"must be contiguous float32 {list(shape)}, is {scales.dtype} {list(scales.shape)}",
        )
        check_same_device(values.device, **{argument: scales})


def ranks_per_tile(max_rank: int) -> int:
    """The ranks of a kernel's tile of FP8 h: what shares a scale, or all ranks."""
    return RANKS_PER_SCALE if max_rank > 16 else 16


def hidden_scales_shape(slices: int, rows: int, max_rank: int) -> tuple[int, int, int]:
    return slices, rows, -(-max_rank // RANKS_PER_SCALE)


def check_hidden_fp8(h: Tensor, h_scales: Tensor | None, slices: int, rows: int, max_rank: int) -> None:
    """float32 [slices, rows, max_rank], or that with shrink's splits before it; or FP8, with scales."""
    fits = h.dtype in (torch.float32, *LARGEST) and h.dim() <= (3 if is_fp8(h) else 4)
    if not fits or tuple(h.shape[-3:]) != (slices, rows, max_rank):
        raise KernelArgumentError(
            "h", f"must be float32 or FP8 [{slices}, {rows}, {max_rank}], is {h.dtype} {list(h.shape)}"
        )
    check_row_scales(h_scales, "h_scales", h, "h", hidden_scales_shape(slices, rows, max_rank))


def check_card(weight: Tensor, argument: str) -> None:
    if weight.is_cuda:
        check_capability(weight.dtype, torch.cuda.get_device_capability(weight.device), argument)


def check_capability(dtype: torch.dtype, capability: tuple[int, int], argument: str) -> None:
    """e4m3 conversions came with sm_89."""
    served = dtype != torch.float8_e4m3fn or capability >= (8, 9)
    card = "sm_{}{}".format(*capability)
    check(served, argument, f"is float8_e4m3fn, which {card} cannot convert: use float8_e5m2")


def check_group_k(group_k: int) -> None:
    """A kernel's step along the contraction lies within one group."""
    fits = group_k == 0 or (group_k >= RANKS_PER_SCALE and group_k & (group_k - 1) == 0)
    check(fits, "group_k", f"must be 0 or a power of 2 from {RANKS_PER_SCALE} up, is {group_k}")
