"""The layers with LoRA: each wraps a base layer and adds what the adapters of a step contribute."""

from executor.lora.layers.base import BaseLayerWithLoRA, LayerPart
from executor.lora.layers.base_linear import BaseLinearLayerWithLoRA
from executor.lora.layers.column_parallel_linear import (
    ColumnParallelLinearWithLoRA,
    ColumnParallelLinearWithShardedLoRA,
    MergedColumnParallelLinearVariableSliceWithLoRA,
    MergedColumnParallelLinearVariableSliceWithShardedLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithShardedLoRA,
    MergedQKVParallelLinearWithLoRA,
    MergedQKVParallelLinearWithShardedLoRA,
    QKVParallelLinearWithLoRA,
    QKVParallelLinearWithShardedLoRA,
)
from executor.lora.layers.fused_moe import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from executor.lora.layers.fused_moe_sharded import FusedMoE3DWithShardedLoRA, FusedMoEWithShardedLoRA
from executor.lora.layers.logits_processor import LogitsProcessorWithLoRA
from executor.lora.layers.replicated_linear import ReplicatedLinearWithLoRA
from executor.lora.layers.row_parallel_linear import (
    RowParallelLinearWithLoRA,
    RowParallelLinearWithShardedLoRA,
)
from executor.lora.layers.vocab_parallel_embedding import VocabParallelEmbeddingWithLoRA

__all__ = [
    "BaseLayerWithLoRA",
    "BaseLinearLayerWithLoRA",
    "ColumnParallelLinearWithLoRA",
    "ColumnParallelLinearWithShardedLoRA",
    "FusedMoE3DWithLoRA",
    "FusedMoE3DWithShardedLoRA",
    "FusedMoEWithLoRA",
    "FusedMoEWithShardedLoRA",
    "LayerPart",
    "LogitsProcessorWithLoRA",
    "MergedColumnParallelLinearVariableSliceWithLoRA",
    "MergedColumnParallelLinearVariableSliceWithShardedLoRA",
    "MergedColumnParallelLinearWithLoRA",
    "MergedColumnParallelLinearWithShardedLoRA",
    "MergedQKVParallelLinearWithLoRA",
    "MergedQKVParallelLinearWithShardedLoRA",
    "QKVParallelLinearWithLoRA",
    "QKVParallelLinearWithShardedLoRA",
    "ReplicatedLinearWithLoRA",
    "RowParallelLinearWithLoRA",
    "RowParallelLinearWithShardedLoRA",
    "VocabParallelEmbeddingWithLoRA",
]
