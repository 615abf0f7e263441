"""LoRA on embed_tokens, cut by token over the ranks; a tied head sees none of it."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from executor.layers import VocabParallelEmbedding
from executor.layers.model_config import ModelConfig
from executor.lora.cut import Cut
from executor.lora.layers.base import BaseLayerWithLoRA, LayerPart
from executor.lora.layout import SlotSlice


class VocabParallelEmbeddingWithLoRA(BaseLayerWithLoRA):
    """y[row] = weight[token] + (scale * A[:r, token]) @ B[:r]. A tied head sees none of it.

    A is cut by token, as the table is; B is whole. One sum over the ranks follows for both.
    """

    base_layer: VocabParallelEmbedding

    def __init__(self, base_layer: VocabParallelEmbedding, module_names: Sequence[str]) -> None:
        super().__init__(base_layer, module_names)

    # Not ParallelLMHead, its subclass: the head's LoRA acts on the logits, in LogitsProcessorWithLoRA.
    source_types = (VocabParallelEmbedding,)

    def parts(self, model_config: ModelConfig | None = None) -> tuple[LayerPart, ...]:
        (name,) = self.module_names
        layer = self.base_layer
        cut = Cut(a_columns=layer.vocab_range)
        return (LayerPart(SlotSlice(name, layer.num_embeddings, layer.embedding_dim, cut)),)

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids [rows] -> [rows, embedding_dim]; the rows are the step's."""
        local_ids, foreign = self.base_layer.local(token_ids)
        y = F.embedding(local_ids, self.base_layer.weight)
        stacked = self.stacked
        self.punica_wrapper.add_lora_embedding(
            y, local_ids, stacked.lora_a[0], stacked.lora_b[0], stacked.ranks, stacked.scales
        )
        y = self.base_layer.reduce(y, foreign)
        self.scale_outputs(y, self.punica_wrapper.token_mapping_meta)
        return y
