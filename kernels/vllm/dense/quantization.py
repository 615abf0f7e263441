"""What the dense operations' arguments say of FP8 and its scales, checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.launching.checks import check, check_same_device
from kernels.launching.fp8 import check_card, check_group_k, is_fp8
from kernels.vllm.scaling import Scaling, row_scales

_FLOATING = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Quantization:
    """The reference's flags. Blocks of group_n outputs and group_k inputs go before per_channel, and are
    meant only where both sizes are given."""

    group_k: int
    group_n: int
    per_channel: bool

    @property
    def group(self) -> tuple[int, int]:
        """Outputs and inputs that share a scale, 0: all."""
        if self.group_k > 0 and self.group_n > 0:
            return self.group_n, self.group_k
        return (1, 0) if self.per_channel else (0, 0)

    def scaling(
        self, stack: Sequence[Tensor], stack_name: str, b_scale: Sequence[Tensor], x: Tensor,
        a_scale: Tensor | None,
    ) -> Scaling:  # fmt: skip
        """Of a stack [max_loras, 1, outputs, inputs] and of rows x [..., rows, inputs].

        Raises KernelArgumentError.
        """
        check(is_fp8(x) or x.dtype in _FLOATING, "inputs", f"are {x.dtype}")
        check_card(x, "inputs")
        check_card(stack[0], stack_name)
        check(
            len(b_scale) == len(stack), "b_scale", f"holds {len(b_scale)} slices, {stack_name} {len(stack)}"
        )
        weights = tuple(
            self._of_slice(scales, f"b_scale[{s}]", weight)
            for s, (scales, weight) in enumerate(zip(b_scale, stack, strict=True))
        )
        input_groups = weights[0].shape[3]
        if input_groups > 1:
            check_group_k(self.group_k)
        if a_scale is not None:
            a_scale = row_scales(a_scale, "a_scale", x.shape[-2], input_groups, x.device)
        return Scaling(weights, a_scale, *self.group)

    def _of_slice(self, scales: Tensor, argument: str, weight: Tensor) -> Tensor:
        """[max_loras, 1, output groups, input groups]; sizes of 1 may be left out, wherever they stand."""
        outputs, inputs = (size or whole for size, whole in zip(self.group, weight.shape[2:], strict=True))
        shape = weight.shape[0], 1, -(-weight.shape[2] // outputs), -(-weight.shape[3] // inputs)
        fits = [size for size in scales.shape if size > 1] == [size for size in shape if size > 1]
        fits = fits and scales.numel() == prod(shape) and scales.is_contiguous()
        if not fits or scales.dtype != torch.float32:
            wanted = f"must be contiguous float32 {[shape[0], *shape[2:]]}"
            raise KernelArgumentError(argument, f"{wanted}, is {scales.dtype} {list(scales.shape)}")
        check_same_device(weight.device, **{argument: scales})
        return scales.view(shape)


def check_unscaled(b_scale: Sequence[Tensor], a_scale: Tensor | None) -> None:
    """Without FP8 there is nothing to scale. Raises KernelArgumentError."""
    check(not b_scale, "b_scale", "is given without use_fp8_w8a8")
    check(a_scale is None, "a_scale", "is given without use_fp8_w8a8")


def with_experts(weights: Sequence[Tensor]) -> list[Tensor]:
    """[max_loras, 1, outputs, inputs], also of weights that come without the 1."""
    return [weight if weight.dim() == 4 else weight.unsqueeze(1) for weight in weights]
