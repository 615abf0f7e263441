from executor.layers import RowParallelLinear
from executor.lora.layers.base_linear import BaseLinearLayerWithLoRA


class RowParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    """One module over a layer that is split by input columns: o_proj, down_proj."""

    source_types = (RowParallelLinear,)
