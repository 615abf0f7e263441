"""What all linear layers with LoRA share: each part's delta is added to its columns of the output."""

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from executor.layers import LinearBase
from executor.layers.followers import Follower, FusedForm
from executor.layers.linear import Output
from executor.layers.model_config import ModelConfig
from executor.lora.cut import Cut
from executor.lora.layers.base import BaseLayerWithLoRA, LayerPart
from executor.lora.layout import SlotSlice
from executor.lora.quantize import FP8_DTYPES


class BaseLinearLayerWithLoRA(BaseLayerWithLoRA):
    """y = base(x), then each served part's delta is added into its own columns of y, in place."""

    base_layer: LinearBase

    def __init__(self, base_layer: LinearBase, module_names: Sequence[str]) -> None:
        super().__init__(base_layer, module_names)

    def parts(self, model_config: ModelConfig | None = None) -> tuple[LayerPart, ...]:
        layer = self.base_layer
        covered = layer.parts_behind(len(self.module_names))
        if covered is None:
            raise ValueError(f"{len(self.module_names)} modules over {len(layer.output_sizes)} parts")
        starts = list(accumulate(layer.output_partition_sizes, initial=0))
        return tuple(
            LayerPart(
                SlotSlice(
                    name,
                    layer.input_size,
                    sum(layer.output_sizes[numbers.start : numbers.stop]),
                    self.cut(numbers),
                ),
                starts[numbers.start],
            )
            for name, numbers in zip(self.module_names, covered, strict=True)
        )

    def cut(self, numbers: range) -> Cut:
        """What this rank holds of a module over these parts of the base layer: as the base layer itself."""
        return Cut(self.base_layer.input_range, self.base_layer.rows_in_tensor(numbers))

    @property
    def column_starts(self) -> list[int]:
        """Where each served part begins in this rank's output."""
        return [part.column_start for part in self.served]

    def forward(self, x: Tensor) -> Output:
        """x and the result are the base layer's, with its options; the rows are the step's."""
        base = self.base_layer
        x = base.own_input(x)
        y = base.partial(x)
        self.add_delta(y, x)
        y = base.exchange(y)
        self.scale_outputs(y, self.punica_wrapper.token_mapping_meta, base.added_bias)
        return base.output(y)

    def followed_by(self, x: Tensor, follower: Follower) -> Tensor:
        """What `follower` makes of this layer's output; it adds the delta itself where that pays."""
        if self.punica_wrapper.token_mapping_meta.no_lora_flag_cpu:
            return follower.plain(self.base_layer(x))
        if follower.fused is None or not self.fits_fused(follower.fused):
            return follower.plain(self(x))
        from executor.lora.fused_delta import followed_by  # needs triton, as whoever made the fused form

        return followed_by(self, x, follower.plain, follower.fused)

    def fits_fused(self, form: FusedForm) -> bool:
        """Whether the delta may be added after `forward`'s other work, from all of the form's slices; in
        steps without DoRA's factors, which come on base and delta."""
        alone = self.group.size == 1 and not self.base_layer.return_bias
        plain = alone and self.stacked.lora_a[0].dtype not in FP8_DTYPES
        return plain and len(self.served) == len(self.all_parts) == form.slices

    def add_delta(self, y: Tensor, x: Tensor) -> None:
        stacked = self.stacked
        self.punica_wrapper.add_lora_linear(
            y,
            x,
            stacked.lora_a,
            stacked.lora_b,
            stacked.ranks,
            stacked.scales,
            self.column_starts,
        )
