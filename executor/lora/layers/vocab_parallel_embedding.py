from collections.abc import Sequence

from torch import Tensor

from executor.layers import VocabParallelEmbedding
from executor.lora.layers.base import BaseLayerWithLoRA, LayerPart
from executor.model_config import ModelConfig


class VocabParallelEmbeddingWithLoRA(BaseLayerWithLoRA):
    """y[row] = weight[token] + (scale * A[:r, token]) @ B[:r]. A tied head sees none of it."""

    base_layer: VocabParallelEmbedding

    def __init__(self, base_layer: VocabParallelEmbedding, module_names: Sequence[str]) -> None:
        super().__init__(base_layer, module_names)

    # Not ParallelLMHead, its subclass: the head's LoRA acts on the logits, in LogitsProcessorWithLoRA.
    source_types = (VocabParallelEmbedding,)

    def parts(self, model_config: ModelConfig | None = None) -> tuple[LayerPart, ...]:
        (name,) = self.module_names
        return (LayerPart(name, self.base_layer.num_embeddings, self.base_layer.embedding_dim),)

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids [rows] -> [rows, embedding_dim]; the rows are the step's."""
        y: Tensor = self.base_layer(token_ids)
        stacked = self.stacked
        self.punica_wrapper.add_lora_embedding(
            y, token_ids, stacked.lora_a[0], stacked.lora_b[0], stacked.ranks, stacked.scales
        )
        return y
