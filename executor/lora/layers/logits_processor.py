"""LoRA on lm_head: the delta is added to the logits, not to the head's weight."""

from collections.abc import Sequence

from torch import Tensor

from executor.layers import LogitsProcessor, ParallelLMHead
from executor.layers.model_config import ModelConfig
from executor.lora.cut import Cut
from executor.lora.layers.base import BaseLayerWithLoRA, LayerPart
from executor.lora.layout import SlotSlice


class LogitsProcessorWithLoRA(BaseLayerWithLoRA):
    """logits[row] = head @ x[row] + (scale * A[:r] @ x[row]) @ B[:r], for the rows that reach the head.

    It wraps the logits, not the head's weight: a tied embedding sees none of it. A is whole on every rank, B
    is cut by token, as the head is. The base layer's `soft_cap` and `scale` come after both.
    """

    base_layer: LogitsProcessor

    def __init__(self, base_layer: LogitsProcessor, module_names: Sequence[str]) -> None:
        super().__init__(base_layer, module_names)

    source_types = (LogitsProcessor,)

    def parts(self, model_config: ModelConfig | None = None) -> tuple[LayerPart, ...]:
        """The base layer has no weight, so hidden_size comes from `model_config` (ValueError without one)."""
        if model_config is None:
            raise ValueError("model_config is needed for the head's input size")
        (name,) = self.module_names
        cut = Cut(b_columns=(self.base_layer.vocab_range,))
        return (LayerPart(SlotSlice(name, model_config.hidden_size, self.base_layer.vocab_size, cut)),)

    def forward(self, lm_head: ParallelLMHead, hidden: Tensor) -> Tensor:
        """hidden [n, hidden], the step's rows that reach the head -> logits float32 [n, vocab]."""
        logits = self.base_layer.local(lm_head, hidden)
        stacked = self.stacked
        self.punica_wrapper.add_lora_logits(
            logits, hidden, stacked.lora_a[0], stacked.lora_b[0], stacked.ranks, stacked.scales
        )
        logits = self.base_layer.gather(logits)
        self.scale_outputs(logits, self.punica_wrapper.prompt_mapping_meta)
        return self.finish(logits)

    @property
    def scale(self) -> float:
        return self.base_layer.scale

    @property
    def soft_cap(self) -> float | None:
        return self.base_layer.soft_cap

    def finish(self, logits: Tensor) -> Tensor:
        return self.base_layer.finish(logits)
