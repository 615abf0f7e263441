"""The plain layers of a decoder. None of them knows LoRA: `executor/lora/` wraps them from outside."""

from executor.layers.activation import SiluAndMul
from executor.layers.embedding import LogitsProcessor, ParallelLMHead, VocabParallelEmbedding
from executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from executor.layers.norm import RMSNorm
from executor.layers.rotary import RotaryEmbedding, apply_rotary

__all__ = [
    "ColumnParallelLinear",
    "LinearBase",
    "LogitsProcessor",
    "MergedColumnParallelLinear",
    "ParallelLMHead",
    "QKVParallelLinear",
    "RMSNorm",
    "ReplicatedLinear",
    "RotaryEmbedding",
    "RowParallelLinear",
    "SiluAndMul",
    "VocabParallelEmbedding",
    "apply_rotary",
]
