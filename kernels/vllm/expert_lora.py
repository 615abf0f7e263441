"""The experts' methods of PunicaWrapperGPU: pairs sorted by slot and expert, then their LoRA."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.launching.moe_tuning import sharing_pays
from kernels.vllm.kernel_meta import LoRAKernelMeta
from kernels.vllm.punica_base import Shared

Blocks = Mapping[str, int | None]

# Pairs of a row and an expert in a block. Kernels take blocks in parts of so many, whatever their size.
_BLOCK_PAIRS = 16
_BLOCK: Blocks = {"BLOCK_SIZE_M": _BLOCK_PAIRS}


class ExpertLoRA:
    """Needs `token_mapping_meta` and `lora_config`. Weights are A [max_loras, experts, rank, in] and B
    [max_loras, experts, out, rank], one tensor a slice (gate and up, or down); ranks are the slots' own.

    `token_lora_mapping`, int32 [rows], stands in for the step's where rows came from other devices.
    """

    token_mapping_meta: LoRAKernelMeta

    def _step(self, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The rows' slots, the step's slots, whether there are none, and their number."""
        specialize: bool = self.lora_config.specialize_active_lora  # type: ignore[attr-defined]
        mapping, _, _, _, lora_ids, no_lora, number = self.token_mapping_meta.meta_args(rows, specialize)
        return mapping, lora_ids, no_lora, number

    def moe_lora_align_block_size(
        self,
        topk_ids: Tensor,
        num_tokens: int,
        block_size: int,
        num_experts: int,
        max_loras: int,
        adapter_enabled: Tensor,
        expert_map: Tensor | None = None,
        pad_sorted_ids: bool = False,
        naive_block_assignment: bool = False,
        token_lora_mapping: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Sort the (row, expert) pairs of each slot by expert, in blocks of one expert each.

        `topk_ids` is [rows, top_k]; with an `expert_map`, int32 [global experts], it holds global numbers and
        the answer local ones. Returns the rows' slots; the pairs' places int32 [max_loras * padded]; the
        blocks' experts int32 [max_loras * blocks], -1 where none; and each slot's padded count. In the naive
        form each pair is its own block: the second and fourth are None, and the third is the pairs' experts.
        """
        # Models without experts load no kernels of theirs.
        from kernels.vllm.moe_lora_align import moe_lora_align_block_size

        mapping, lora_ids, _, _ = self._step(num_tokens)
        mapping = mapping if token_lora_mapping is None else token_lora_mapping
        if naive_block_assignment:
            return mapping, None, topk_ids.reshape(-1), None
        experts = num_experts if expert_map is None else expert_map.numel()
        pairs = topk_ids.numel()
        padded = pairs + experts * (block_size - 1)
        if pad_sorted_ids:
            padded = -(-padded // block_size) * block_size
        if pairs < experts:
            padded = pairs * block_size
        blocks = -(-padded // block_size)
        device = topk_ids.device
        sorted_ids = torch.empty(max_loras * padded, dtype=torch.int32, device=device)
        expert_ids = torch.full((max_loras * blocks,), -1, dtype=torch.int32, device=device)
        counts = torch.empty(max_loras, dtype=torch.int32, device=device)
        moe_lora_align_block_size(
            topk_ids,
            mapping,
            experts,
            block_size,
            max_loras,
            padded,
            blocks,
            sorted_ids,
            expert_ids,
            counts,
            adapter_enabled,
            lora_ids,
            expert_map,
        )
        return mapping, sorted_ids, expert_ids, counts

    def add_lora_fused_moe(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        topk_weights: Tensor,
        sorted_token_ids: Tensor | None,
        expert_ids: Tensor,
        num_tokens_post_padded: Tensor | None,
        max_lora_rank: int,
        top_k_num: int,
        shrink_config: Blocks,
        expand_config: Blocks,
        adapter_enabled: Tensor,
        mul_routed_weight: bool = False,
        fully_sharded: bool = False,
        offset: int = 0,
        token_lora_mapping: Tensor | None = None,
        add_inputs: bool = True,
    ) -> None:
        """y[row, k] += (x[row] @ A[slot, expert].T) @ B[slot, expert].T for each of a row's experts.

        y is [rows, top_k, slices * out], `topk_weights` [rows, top_k], multiplied in with
        `mul_routed_weight`. Of the configs, the block sizes, warps and stages are read.
        """
        from kernels.vllm.fused_moe_lora import fused_moe_lora

        mapping, lora_ids, no_lora, number = self._step(x.size(0))
        if no_lora.item():
            return
        fused_moe_lora(
            y,
            x,
            lora_a_stacked,
            lora_b_stacked,
            topk_weights,
            sorted_token_ids,
            expert_ids,
            num_tokens_post_padded,
            mapping if token_lora_mapping is None else token_lora_mapping,
            max_lora_rank,
            top_k_num,
            lora_ids,
            number,
            adapter_enabled,
            *_sizes(shrink_config),
            *_sizes(expand_config),
            mul_routed_weight,
            fully_sharded,
            offset,
            add_inputs,
        )

    def add_lora_w13(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        topk_ids: Tensor,
        topk_weights: Tensor,
        expert_map: Tensor | None,
        w1: Tensor,
        w2: Tensor,
        num_tokens: int,
        top_k_num: int,
        max_loras: int,
        adapter_enabled: Tensor,
        local_num_experts: int,
        top_k: int,
        num_slices: int,
        fully_sharded: bool,
        use_tuned_config: bool,
        add_inputs: bool = True,
        token_lora_mapping: Tensor | None = None,
    ) -> Shared:
        """Add gate's and up's adapters to y, the first product's [rows * top_k, slices * out].

        Returns what `add_lora_w2` takes. Block sizes are ours: `use_tuned_config`, `w1`, `w2` and
        `num_slices`, from which the reference picks its own, are not read.
        """
        groups = local_num_experts * min(max_loras, num_tokens)
        # A captured graph is for any number of adapters: as many as there can be are taken to be there.
        naive = not (fully_sharded or expert_map is not None or sharing_pays(num_tokens * top_k, groups))
        mapping, sorted_ids, expert_ids, counts = self.moe_lora_align_block_size(
            topk_ids,
            num_tokens,
            _BLOCK_PAIRS,
            local_num_experts,
            max_loras,
            adapter_enabled,
            expert_map,
            naive_block_assignment=naive,
            token_lora_mapping=token_lora_mapping,
        )
        self.add_lora_fused_moe(
            y.view(-1, top_k_num, y.shape[-1]),
            x,
            lora_a_stacked,
            lora_b_stacked,
            topk_weights,
            _by_slot(sorted_ids, max_loras),
            expert_ids if naive else expert_ids.view(max_loras, -1),
            counts,
            lora_a_stacked[0].shape[-2],
            top_k,
            _BLOCK,
            _BLOCK,
            adapter_enabled,
            fully_sharded=fully_sharded,
            token_lora_mapping=mapping,
            add_inputs=add_inputs,
        )
        return sorted_ids, expert_ids, counts, mapping

    def add_lora_w2(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        topk_weights: Tensor,
        sorted_token_ids_lora: Tensor | None,
        expert_ids_lora: Tensor | None,
        num_tokens_post_padded_lora: Tensor | None,
        token_lora_mapping: Tensor | None,
        num_tokens: int,
        w1: Tensor,
        w2: Tensor,
        top_k_num: int,
        max_loras: int,
        adapter_enabled: Tensor,
        top_k: int,
        fully_sharded: bool,
        tp_rank: int,
        use_tuned_config: bool,
        add_inputs: bool = True,
    ) -> None:
        """Add down's adapter to y, the second product's [rows, top_k, out], before experts are summed.

        Takes what `add_lora_w13` returned. Block sizes are ours, as there.
        """
        if expert_ids_lora is None:
            raise KernelArgumentError("expert_ids_lora", "is missing: add_lora_w13 returns it")
        naive = sorted_token_ids_lora is None
        self.add_lora_fused_moe(
            y,
            x,
            lora_a_stacked,
            lora_b_stacked,
            topk_weights,
            _by_slot(sorted_token_ids_lora, max_loras),
            expert_ids_lora if naive else expert_ids_lora.view(max_loras, -1),
            num_tokens_post_padded_lora,
            lora_a_stacked[0].shape[-2],
            top_k,
            _BLOCK,
            _BLOCK,
            adapter_enabled,
            True,
            fully_sharded=fully_sharded,
            # A sharded B makes this device's columns alone.
            offset=lora_b_stacked[0].shape[-2] * tp_rank if fully_sharded else 0,
            token_lora_mapping=token_lora_mapping,
            add_inputs=add_inputs,
        )


def _by_slot(sorted_ids: Tensor | None, max_loras: int) -> Tensor | None:
    return None if sorted_ids is None else sorted_ids.view(max_loras, -1)


def _sizes(config: Blocks) -> tuple[int, ...]:
    """Rows, columns and depth of a block, blocks of a group, warps, stages, and parts of the depth."""
    defaults = {
        "BLOCK_SIZE_M": 64,
        "BLOCK_SIZE_N": 64,
        "BLOCK_SIZE_K": 32,
        "GROUP_SIZE_M": 8,
        "NUM_WARPS": 4,
        "NUM_STAGES": 3,
        "SPLIT_K": 1,
    }
    return tuple(config.get(name) or default for name, default in defaults.items())
