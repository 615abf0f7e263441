"""The Triton form of the step's LoRA work. Needs triton; kernels/punica.py holds the contract."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from kernels.fused_moe_lora import fused_moe_lora, moe_blocks
from kernels.launching.checks import check_rows
from kernels.launching.fp8 import is_fp8
from kernels.launching.moe_blocks import MoEBlocks
from kernels.launching.side_stream import SideStream
from kernels.lora_embedding import lora_embedding
from kernels.lora_expand import lora_expand
from kernels.lora_expand_fp8 import lora_expand_fp8
from kernels.lora_linear import add_pair
from kernels.lora_linear_fp8 import add_pair_fp8
from kernels.lora_shrink import lora_shrink
from kernels.lora_shrink_fp8 import lora_shrink_fp8
from kernels.metadata.meta import LoRAKernelMeta
from kernels.punica import PunicaWrapperBase
from kernels.scale_outputs import scale_outputs


class PunicaWrapperGPU(PunicaWrapperBase):
    """The Triton kernels: two launches a layer, whose cost follows the rows and ranks that are there."""

    @cached_property
    def side_stream(self) -> SideStream | None:
        """The stream for shrink beside the base product. None where the kernels are interpreted."""
        return SideStream(self.device) if self.device.type == "cuda" else None

    def add_shrink(
        self, h: Tensor, x: Tensor, lora_a: Sequence[Tensor], ranks: Tensor, scales: Tensor
    ) -> None:
        if is_fp8(lora_a[0]):
            lora_shrink_fp8(h, x, lora_a, self._ones(lora_a), ranks, scales, self.token_mapping_meta)
        else:
            lora_shrink(h, x, lora_a, ranks, scales, self.token_mapping_meta)

    def add_expand(
        self,
        y: Tensor,
        h: Tensor,
        lora_b: Sequence[Tensor],
        ranks: Tensor,
        column_starts: Sequence[int],
        *,
        add_inputs: bool = True,
    ) -> None:
        meta = self.token_mapping_meta
        if is_fp8(lora_b[0]):
            ones = self._ones(lora_b)
            lora_expand_fp8(y, h, lora_b, ones, ranks, column_starts, meta, add_inputs=add_inputs)
        else:
            lora_expand(y, h, lora_b, ranks, column_starts, meta, add_inputs=add_inputs)

    def add_lora_embedding(
        self, y: Tensor, token_ids: Tensor, lora_a: Tensor, lora_b: Tensor, ranks: Tensor, scales: Tensor
    ) -> None:
        h = torch.empty((1, len(token_ids), lora_a.shape[1]), dtype=torch.float32, device=y.device)
        lora_embedding(h, token_ids, lora_a, ranks, scales, self.token_mapping_meta)
        self.add_expand(y, h, (lora_b,), ranks, (0,))

    def _add_pair(
        self,
        y: Tensor,
        x: Tensor,
        lora_a: Sequence[Tensor],
        lora_b: Sequence[Tensor],
        ranks: Tensor,
        scales: Tensor,
        column_starts: Sequence[int],
        meta: LoRAKernelMeta,
    ) -> None:
        if not is_fp8(lora_a[0]):
            add_pair(y, x, lora_a, lora_b, ranks, scales, column_starts, meta)
            return
        a_scales, b_scales = self._ones(lora_a), self._ones(lora_b)
        add_pair_fp8(y, x, lora_a, a_scales, lora_b, b_scales, ranks, scales, column_starts, meta)

    def scale_outputs(
        self, y: Tensor, factors: Tensor, marks: Tensor, bias: Tensor | None, meta: LoRAKernelMeta
    ) -> None:
        scale_outputs(y, factors, marks, bias, meta)

    def _ones(self, stack: Sequence[Tensor]) -> list[Tensor]:
        """Whoever fills FP8 slots puts the scales of their weights into `scales`: here they are 1."""
        return [self._one] * len(stack)

    @cached_property
    def _one(self) -> Tensor:
        return torch.ones(self.max_loras, 1, 1, device=self.device)

    def moe_lora_align_block_size(
        self, topk_ids: Tensor, num_experts: int, *, expert_map: Tensor | None = None
    ) -> MoEBlocks:
        check_rows(topk_ids, "topk_ids", self.token_mapping_meta)
        return moe_blocks(topk_ids, num_experts, self.token_mapping_meta, expert_map=expert_map)

    def add_lora_fused_moe(
        self,
        y: Tensor,
        x: Tensor,
        lora_a: Sequence[Tensor],
        lora_b: Sequence[Tensor],
        ranks: Tensor,
        scales: Tensor,
        column_starts: Sequence[int],
        blocks: MoEBlocks,
        *,
        routed_weights: Tensor | None = None,
        add_inputs: bool = True,
    ) -> None:
        fused_moe_lora(
            y, x, lora_a, lora_b, ranks, scales, column_starts, blocks, routed_weights=routed_weights,
            add_inputs=add_inputs,
        )  # fmt: skip
