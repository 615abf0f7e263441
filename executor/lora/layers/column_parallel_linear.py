"""LoRA on layers that are split by output columns, single or packed (gate and up; q, k and v).

A packed one has a module for each part, or one over several.

Every class has a twin for fully sharded adapters, where A is cut along the rank too.
"""

from typing import cast

import torch
from torch import Tensor, nn

from executor.layers import ColumnParallelLinear, LinearBase, MergedColumnParallelLinear, QKVParallelLinear
from executor.lora.layers.base import Factors
from executor.lora.layers.base_linear import BaseLinearLayerWithLoRA
from executor.lora.layers.sharded import RankShardedLayerWithLoRA


class ColumnParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    """One module over the whole output, also where the base stacks two parts that its checkpoints never
    split: each rank's B is its share of the one, then of the other."""

    source_types = (ColumnParallelLinear, MergedColumnParallelLinear)
    fully_sharded = False

    @classmethod
    def fits(cls, source_layer: nn.Module, modules: int) -> bool:
        return modules == 1 and len(cast(LinearBase, source_layer).output_sizes) <= 2


class ColumnParallelLinearWithShardedLoRA(RankShardedLayerWithLoRA, ColumnParallelLinearWithLoRA):
    pass


class MergedColumnParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    """One module a part: gate_proj and up_proj over gate_up_proj. Or fewer modules than parts, as the base
    layer's `tensor_parts` say: in_proj_qkv and in_proj_z over four. A missing one contributes nothing."""

    source_types = (MergedColumnParallelLinear,)
    fully_sharded = False

    @classmethod
    def fits(cls, source_layer: nn.Module, modules: int) -> bool:
        layer = cast(LinearBase, source_layer)
        parts = len(layer.output_sizes)
        return modules > 1 and (parts == 2 or modules < parts) and layer.parts_behind(modules) is not None


class MergedColumnParallelLinearWithShardedLoRA(RankShardedLayerWithLoRA, MergedColumnParallelLinearWithLoRA):
    pass


class MergedColumnParallelLinearVariableSliceWithLoRA(BaseLinearLayerWithLoRA):
    """Three or more parts of any widths, with one module over all of them or one a part. In the second case
    one adapter over all may be given too: its A serves every part, its B is split."""

    source_types = (MergedColumnParallelLinear,)
    fully_sharded = False

    @classmethod
    def fits(cls, source_layer: nn.Module, modules: int) -> bool:
        parts = len(cast(LinearBase, source_layer).output_sizes)
        return parts > 2 and modules in (1, parts)

    def one_a_module(
        self, lora_a: Factors, lora_b: Factors
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        widths = [part.slot_slice.out_features for part in self.all_parts]
        if isinstance(lora_a, Tensor) and isinstance(lora_b, Tensor) and len(lora_b) == sum(widths):
            return [lora_a] * len(widths), list(torch.split(lora_b, widths))
        return super().one_a_module(lora_a, lora_b)


class MergedColumnParallelLinearVariableSliceWithShardedLoRA(
    RankShardedLayerWithLoRA, MergedColumnParallelLinearVariableSliceWithLoRA
):
    pass


class QKVParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    """One module over q, k and v together, for models whose checkpoints hold one fused projection. Each
    rank's B is its heads of q, of k and of v, with KV heads that several ranks hold given to each of them."""

    source_types = (QKVParallelLinear,)
    fully_sharded = False


class QKVParallelLinearWithShardedLoRA(RankShardedLayerWithLoRA, QKVParallelLinearWithLoRA):
    pass


class MergedQKVParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    """q_proj, k_proj and v_proj as three modules of their own widths. A missing one contributes nothing."""

    source_types = (QKVParallelLinear,)
    fully_sharded = False

    @classmethod
    def fits(cls, source_layer: nn.Module, modules: int) -> bool:
        return modules == 3


class MergedQKVParallelLinearWithShardedLoRA(RankShardedLayerWithLoRA, MergedQKVParallelLinearWithLoRA):
    pass
