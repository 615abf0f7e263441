from executor.layers import ReplicatedLinear
from executor.lora.layers.base_linear import BaseLinearLayerWithLoRA


class ReplicatedLinearWithLoRA(BaseLinearLayerWithLoRA):
    """One module over a layer that every device holds whole."""

    source_types = (ReplicatedLinear,)
