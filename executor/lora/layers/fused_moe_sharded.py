"""LoRA on experts, fully sharded: the products with A are gathered, or summed, over the ranks."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from executor.layers.fused_moe import FusedMoE
from executor.lora.cut import Cut
from executor.lora.layers.base import LayerPart
from executor.lora.layers.fused_moe import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from executor.lora.layers.sharded import gathered
from kernels.launching.moe_blocks import MoEBlocks


class FusedMoEWithShardedLoRA(FusedMoEWithLoRA):
    """Gate's and up's A is dealt over the ranks by row, and h gathered; down's B is cut by output, and h
    summed, so that the one sum that follows also gathers the columns. Steps without adapters exchange
    nothing. Not together with expert parallelism, where no rank has a share of every expert."""

    fully_sharded = True

    @classmethod
    def fits(cls, source_layer: nn.Module, modules: int) -> bool:
        if not super().fits(source_layer, modules) or not isinstance(source_layer, FusedMoE):
            return False
        divides = source_layer.hidden_size % source_layer.group.size == 0
        return divides and not source_layer.config.expert_parallel

    def first_cut(self, cut: Cut) -> Cut:
        return replace(cut, shard=self.group.rank, shards=self.group.size)

    def last_cut(self, cut: Cut) -> Cut:
        return replace(cut, b_columns=(self._own_outputs(),))

    def _own_outputs(self) -> range:
        return self.group.share(self.base_layer.hidden_size)

    def _out_of(self, name: str) -> LayerPart:
        return replace(super()._out_of(name), column_start=self._own_outputs().start)

    def add_delta(
        self, y: Tensor, x: Tensor, parts: range, blocks: MoEBlocks, weights: Tensor | None
    ) -> None:
        if self.punica_wrapper.token_mapping_meta.no_lora_flag_cpu:
            return
        h = self._shrunk(x, parts, blocks)
        dealt = self.served[parts.start].cut.shards > 1
        max_rank = self.stacked.lora_b[0].shape[1]
        whole = gathered(self.group, h, max_rank) if dealt else self.group.all_reduce(h)
        for number, slice_h in zip(parts, whole, strict=True):
            self._expand(y, slice_h, number, blocks, weights)

    def _shrunk(self, x: Tensor, parts: range, blocks: MoEBlocks) -> Tensor:
        """scale * A_shard @ x of every pair: float32 [slices, pairs, rows of this rank's A]."""
        own = slice(parts.start, parts.stop)
        lora_a = self.lora_a[own]
        rows = lora_a[0].shape[2]
        h = torch.zeros(blocks.num_pairs, len(parts) * rows, dtype=torch.float32, device=x.device)
        self.punica_wrapper.add_lora_fused_moe(
            h,
            x,
            lora_a,
            [self._identity(rows, x.device)] * len(parts),
            self.for_every_expert(self.stacked.shrink_ranks[own]),
            self.for_every_expert(self.stacked.scales[own]),
            [number * rows for number in range(len(parts))],
            blocks,
        )
        return h.view(-1, len(parts), rows).transpose(0, 1).contiguous()

    def _expand(self, y: Tensor, h: Tensor, number: int, blocks: MoEBlocks, weights: Tensor | None) -> None:
        """Adds h [pairs, max_rank] @ B to one part's columns."""
        ranks = self.stacked.ranks[number : number + 1]
        self.punica_wrapper.add_lora_fused_moe(
            y,
            h,
            (self._identity(h.shape[1], h.device),),
            (self.lora_b[number],),
            self.for_every_expert(ranks),
            self.for_every_expert(torch.ones_like(ranks, dtype=torch.float32)),
            (self.served[number].column_start,),
            blocks,
            routed_weights=weights,
        )

    def _identity(self, rows: int, device: torch.device) -> Tensor:
        """[max_loras, experts, rows, rows]: the half that leaves h as it is, for one half at a time."""
        slots, experts = self.stacked.ranks.shape[1], self.base_layer.num_local_experts
        return torch.eye(rows, device=device).expand(slots, experts, rows, rows)


class FusedMoE3DWithShardedLoRA(FusedMoEWithShardedLoRA, FusedMoE3DWithLoRA):
    pass
