from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from executor.layers import LinearBase
from executor.lora.layers.base import BaseLayerWithLoRA, LayerPart
from executor.model_config import ModelConfig


class BaseLinearLayerWithLoRA(BaseLayerWithLoRA):
    """y = base(x), then each served part's delta is added into its own columns of y, in place."""

    base_layer: LinearBase

    def __init__(self, base_layer: LinearBase, module_names: Sequence[str]) -> None:
        super().__init__(base_layer, module_names)

    def output_widths(self) -> tuple[int, ...]:
        """Widths of the parts in the base layer's output. One module over stacked parts spans them all."""
        return (self.base_layer.output_size,) if len(self.module_names) == 1 else self.base_layer.output_sizes

    def parts(self, model_config: ModelConfig | None = None) -> tuple[LayerPart, ...]:
        widths = self.output_widths()
        starts = accumulate(widths, initial=0)
        return tuple(
            LayerPart(name, self.base_layer.input_size, width, start)
            for name, width, start in zip(self.module_names, widths, starts, strict=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [rows, in] -> y [rows, out]; the rows are the step's."""
        y: Tensor = self.base_layer(x)
        stacked = self.stacked
        self.punica_wrapper.add_lora_linear(
            y,
            x,
            stacked.lora_a,
            stacked.lora_b,
            stacked.ranks,
            stacked.scales,
            [part.column_start for part in self.served],
        )
        return y
