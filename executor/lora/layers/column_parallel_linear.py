"""Layers that are split by output columns. A packed one has a module for each part, or one over all."""

from executor.layers import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear
from executor.lora.layers.base_linear import BaseLinearLayerWithLoRA


class ColumnParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    """One module over the whole output, also where the base stacks parts that its checkpoints never split."""

    source_types = (ColumnParallelLinear, MergedColumnParallelLinear)


class MergedColumnParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    """One module a part: gate_proj and up_proj over gate_up_proj. A missing one contributes nothing."""

    source_types = (MergedColumnParallelLinear,)
    one_module_per_part = True


class QKVParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    """One module over q, k and v together, for models whose checkpoints hold one fused projection."""

    source_types = (QKVParallelLinear,)


class MergedQKVParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    """q_proj, k_proj and v_proj as three modules of their own widths. A missing one contributes nothing."""

    source_types = (QKVParallelLinear,)
    one_module_per_part = True
