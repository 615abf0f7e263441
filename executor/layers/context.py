"""What the layers of one step share: rows, cache, attention and adapters, handed down as an argument."""

from dataclasses import dataclass

from torch import Tensor

from executor.layers.attention import KVCache, StepAttention
from executor.layers.followers import Followers
from kernels.punica import PunicaWrapperBase


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What every layer of a step may look at. Rows are the sequences' tokens, one sequence after another."""

    positions: Tensor  # [rows] int64
    logits_rows: Tensor  # [n] int64: the rows that reach the head, in row order of the sequences
    kv_cache: KVCache
    attention: StepAttention
    followers: Followers
    punica: PunicaWrapperBase | None
