"""LoRA on a linear layer that every rank holds whole."""

from executor.layers import ReplicatedLinear
from executor.lora.layers.base_linear import BaseLinearLayerWithLoRA


class ReplicatedLinearWithLoRA(BaseLinearLayerWithLoRA):
    """One module over a layer that every rank holds whole, with A and B whole too."""

    source_types = (ReplicatedLinear,)
