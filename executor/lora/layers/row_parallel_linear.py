"""LoRA on layers that are split by input columns: one sum over the ranks, for base and delta."""

from dataclasses import replace
from typing import cast

from torch import Tensor, nn

from executor.layers import LinearBase, RowParallelLinear
from executor.layers.model_config import ModelConfig
from executor.lora.cut import Cut
from executor.lora.layers.base import LayerPart
from executor.lora.layers.base_linear import BaseLinearLayerWithLoRA
from executor.lora.layers.sharded import ShardedLinearLayerWithLoRA


class RowParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    """One module over o_proj or down_proj. A is cut as the weight is, by input; B is whole. A rank's delta is
    its own term of the sum, added before it."""

    base_layer: RowParallelLinear
    source_types = (RowParallelLinear,)
    fully_sharded = False


class RowParallelLinearWithShardedLoRA(ShardedLinearLayerWithLoRA, RowParallelLinearWithLoRA):
    """B too is cut, by output: h, which is small, is summed over the ranks, and each then adds the whole
    delta to its own columns of its term. So the one sum that follows also gathers the columns."""

    @classmethod
    def fits(cls, source_layer: nn.Module, modules: int) -> bool:
        layer = cast(LinearBase, source_layer)
        return modules == 1 and layer.output_size % layer.group.size == 0

    def parts(self, model_config: ModelConfig | None = None) -> tuple[LayerPart, ...]:
        own = self.group.share(self.base_layer.output_size)
        return tuple(replace(part, column_start=own.start) for part in super().parts(model_config))

    def cut(self, numbers: range) -> Cut:
        return replace(super().cut(numbers), b_columns=(self.group.share(self.base_layer.output_size),))

    def whole_h(self, h: Tensor) -> Tensor:
        return self.group.all_reduce(h)
