"""What sharded adapters need between shrink and expand: h is gathered, or summed, over the ranks."""

from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from executor.distributed import ParallelGroup
from executor.lora.cut import Cut
from executor.lora.layers.base_linear import BaseLinearLayerWithLoRA


class ShardedLinearLayerWithLoRA(BaseLinearLayerWithLoRA):
    """delta[row] = whole_h(scale * A_shard @ x[row]) @ B_shard. Steps without adapters exchange nothing."""

    fully_sharded = True

    def add_delta(self, y: Tensor, x: Tensor) -> None:
        if self.punica_wrapper.token_mapping_meta.no_lora_flag_cpu:
            return
        stacked = self.stacked
        shape = (len(stacked.lora_a), x.shape[0], stacked.lora_a[0].shape[1])
        h = torch.empty(shape, dtype=torch.float32, device=x.device)
        self.punica_wrapper.add_shrink(h, x, stacked.lora_a, stacked.shrink_ranks, stacked.scales)
        self.punica_wrapper.add_expand(y, self.whole_h(h), stacked.lora_b, stacked.ranks, self.column_starts)

    @abstractmethod
    def whole_h(self, h: Tensor) -> Tensor:
        """This rank's h [slices, rows, its part] -> everybody's, float32 [slices, rows, max_rank]."""


class RankShardedLayerWithLoRA(ShardedLinearLayerWithLoRA):
    """The form for layers that are split by output: every rank has x whole, and shrinks by its share of A's
    rows."""

    def cut(self, numbers: range) -> Cut:
        return replace(super().cut(numbers), shard=self.group.rank, shards=self.group.size)

    def whole_h(self, h: Tensor) -> Tensor:
        return gathered(self.group, h, self.stacked.lora_b[0].shape[1])


def gathered(group: ParallelGroup, h: Tensor, max_rank: int) -> Tensor:
    """h [slices, rows, ceil(max_rank / ranks)] of every rank -> [slices, rows, max_rank]: column i is column
    i // ranks of rank i % ranks, as A's rows were dealt."""
    dealt = group.all_gather(h).permute(1, 2, 3, 0).flatten(2)
    # A copy: `contiguous` leaves any stride to a dimension of size 1, and a single rank's must be 1, too.
    return dealt[:, :, :max_rank].clone(memory_format=torch.contiguous_format)
