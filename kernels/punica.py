"""The step's LoRA work as the layers see it: fill the metadata once, then add deltas layer by layer."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.launching.moe_blocks import MoEBlocks
from kernels.metadata.launch_plan import LaunchPlan
from kernels.metadata.meta import LoRAKernelMeta, LoRAMapping, make_metas
from kernels.metadata.native import Work
from kernels.reference.fused_moe_lora import fused_moe_lora
from kernels.reference.lora_embedding import lora_embedding
from kernels.reference.lora_expand import lora_expand
from kernels.reference.lora_shrink import lora_shrink
from kernels.reference.moe_lora_align import moe_lora_align_block_size
from kernels.reference.scale_outputs import scale_outputs


class _Described(NamedTuple):
    """The last step as it was given, and what was made of it."""

    content: tuple[Hashable, Hashable]
    plans: tuple[LaunchPlan | None, LaunchPlan | None]
    work: Work
    prompt_work: Work


class PunicaWrapperBase(ABC):
    """Holds a step's metas: `token_mapping_meta` for its rows, `prompt_mapping_meta` for the head's rows.

    Stacked weights are A slices [max_loras, max_rank, in] and rank-major B slices [max_loras, max_rank, out],
    strided views of one arena; ranks int32 and scales float32 are [slices, max_loras]. Every `add_` method
    changes its first argument in place, refuses arguments whose rows are not the metadata's
    (KernelArgumentError, naming the argument), leaves base rows untouched, does nothing in a base-only step.
    """

    def __init__(self, max_loras: int, max_num_tokens: int, device: torch.device | str) -> None:
        self.max_loras = max_loras
        self.device = torch.device(device)
        # Prompt log-probabilities can send every row of a step to the head.
        self.token_mapping_meta, self.prompt_mapping_meta = make_metas(2, max_loras, max_num_tokens, device)
        self._last: _Described | None = None

    def update_metadata(
        self, mapping: LoRAMapping, plan: LaunchPlan | None = None, prompt_plan: LaunchPlan | None = None
    ) -> None:
        """Describe the next step: once a step, before the model runs. One host-to-device copy, no sync.

        The plans are those of a captured graph that is to be replayed; without one the step is cut as suits
        it. Raises KernelArgumentError, with the last step's description untouched. A step like the last one,
        as decoding has while its sequences stay, is known by its runs and costs no copy; so all steps belong
        to one stream.
        """
        tokens, prompt, last = self.token_mapping_meta, self.prompt_mapping_meta, self._last
        content, plans = mapping.content(), (plan, prompt_plan)
        if (
            last is not None
            and tokens.describes(last.work)
            and prompt.describes(last.prompt_work)
            and plans == last.plans
            and content == last.content
        ):
            return
        work = tokens.describe(mapping.index_mapping, plan)
        # As in a step of plain decoding: every row reaches the head.
        same = plan == prompt_plan and content[0] == content[1]
        prompt_work = work if same else prompt.describe(mapping.prompt_mapping, prompt_plan)
        turn = tokens.staging.begin()
        tokens.fill(turn, work)
        prompt.fill(turn, prompt_work)
        tokens.staging.send()
        self._last = _Described(content, plans, work, prompt_work)

    def set_slot_rank(self, slot: int, rank: int) -> None:
        """Tell a slot's highest rank, when an adapter enters it. It steers speed only, never the result."""
        self.token_mapping_meta.slot_ranks[slot] = rank
        self.prompt_mapping_meta.slot_ranks[slot] = rank
        self._last = None

    @abstractmethod
    def add_shrink(
        self, h: Tensor, x: Tensor, lora_a: Sequence[Tensor], ranks: Tensor, scales: Tensor
    ) -> None:
        """h[s, p, :r] = scale * x[row(p)] @ A_s[slot, :r].T; h is float32 [slices, rows, max_rank]."""

    @abstractmethod
    def add_expand(
        self,
        y: Tensor,
        h: Tensor,
        lora_b: Sequence[Tensor],
        ranks: Tensor,
        column_starts: Sequence[int],
        *,
        add_inputs: bool = True,
    ) -> None:
        """y[row(p), start_s : start_s + out_s] += h[s, p, :r] @ B_s[slot, :r]."""

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a: Sequence[Tensor],
        lora_b: Sequence[Tensor],
        ranks: Tensor,
        scales: Tensor,
        column_starts: Sequence[int],
    ) -> None:
        """y[row, start_s : start_s + out_s] += (scale * x[row] @ A_s[slot, :r].T) @ B_s[slot, :r]."""
        self._add_pair(y, x, lora_a, lora_b, ranks, scales, column_starts, self.token_mapping_meta)

    @abstractmethod
    def add_lora_embedding(
        self, y: Tensor, token_ids: Tensor, lora_a: Tensor, lora_b: Tensor, ranks: Tensor, scales: Tensor
    ) -> None:
        """y[row] += (scale * A[slot, :r, token_ids[row]]) @ B[slot, :r]."""

    def add_lora_logits(
        self, y: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, ranks: Tensor, scales: Tensor
    ) -> None:
        """y[row] += (scale * x[row] @ A[slot, :r].T) @ B[slot, :r], for the rows of `prompt_mapping_meta`."""
        self._add_pair(y, x, (lora_a,), (lora_b,), ranks, scales, (0,), self.prompt_mapping_meta)

    @abstractmethod
    def scale_outputs(
        self, y: Tensor, factors: Tensor, marks: Tensor, bias: Tensor | None, meta: LoRAKernelMeta
    ) -> None:
        """y[row] = factors[slot] * (y[row] - bias) + bias where marks[slot] >= 0, for the rows of `meta`: one
        of this wrapper's two."""

    @abstractmethod
    def _add_pair(
        self,
        y: Tensor,
        x: Tensor,
        lora_a: Sequence[Tensor],
        lora_b: Sequence[Tensor],
        ranks: Tensor,
        scales: Tensor,
        column_starts: Sequence[int],
        meta: LoRAKernelMeta,
    ) -> None:
        """Shrink and expand over the rows of `meta`."""

    @abstractmethod
    def moe_lora_align_block_size(
        self, topk_ids: Tensor, num_experts: int, *, expert_map: Tensor | None = None
    ) -> MoEBlocks:
        """The step's expert choices by slot and expert, for `add_lora_fused_moe`; once an expert layer.

        topk_ids int [rows, topk] holds global numbers; expert_map int32 [global experts] gives the place
        among the `num_experts` that are here, or -1.
        """

    @abstractmethod
    def add_lora_fused_moe(
        self,
        y: Tensor,
        x: Tensor,
        lora_a: Sequence[Tensor],
        lora_b: Sequence[Tensor],
        ranks: Tensor,
        scales: Tensor,
        column_starts: Sequence[int],
        blocks: MoEBlocks,
        *,
        routed_weights: Tensor | None = None,
        add_inputs: bool = True,
    ) -> None:
        """y[p, start_s : start_s + out_s] += w[p] * (scale * x[row(p)] @ A_s[slot, e, :r].T) @ B_s[slot, e].

        p = row * topk + k is an expert choice, e its expert. Stacks have the experts behind the slots, ranks
        and scales are [slices, max_loras, experts]: kernels/reference/fused_moe_lora.py.
        """


class PunicaWrapperCPU(PunicaWrapperBase):
    """The reference operations: one matmul per active slot and slice, at the adapter's own rank."""

    def __init__(self, max_loras: int, max_num_tokens: int, device: torch.device | str = "cpu") -> None:
        super().__init__(max_loras, max_num_tokens, device)

    def add_shrink(
        self, h: Tensor, x: Tensor, lora_a: Sequence[Tensor], ranks: Tensor, scales: Tensor
    ) -> None:
        lora_shrink(h, x, lora_a, ranks, scales, self.token_mapping_meta)

    def add_expand(
        self,
        y: Tensor,
        h: Tensor,
        lora_b: Sequence[Tensor],
        ranks: Tensor,
        column_starts: Sequence[int],
        *,
        add_inputs: bool = True,
    ) -> None:
        lora_expand(y, h, lora_b, ranks, column_starts, self.token_mapping_meta, add_inputs=add_inputs)

    def _add_pair(
        self,
        y: Tensor,
        x: Tensor,
        lora_a: Sequence[Tensor],
        lora_b: Sequence[Tensor],
        ranks: Tensor,
        scales: Tensor,
        column_starts: Sequence[int],
        meta: LoRAKernelMeta,
    ) -> None:
        h = _hidden(lora_a, x)
        lora_shrink(h, x, lora_a, ranks, scales, meta)
        lora_expand(y, h, lora_b, ranks, column_starts, meta)

    def scale_outputs(
        self, y: Tensor, factors: Tensor, marks: Tensor, bias: Tensor | None, meta: LoRAKernelMeta
    ) -> None:
        scale_outputs(y, factors, marks, bias, meta)

    def add_lora_embedding(
        self, y: Tensor, token_ids: Tensor, lora_a: Tensor, lora_b: Tensor, ranks: Tensor, scales: Tensor
    ) -> None:
        h = _hidden((lora_a,), token_ids)
        lora_embedding(h, token_ids, lora_a, ranks, scales, self.token_mapping_meta)
        self.add_expand(y, h, (lora_b,), ranks, (0,))

    def moe_lora_align_block_size(
        self, topk_ids: Tensor, num_experts: int, *, expert_map: Tensor | None = None
    ) -> MoEBlocks:
        # A block for all pairs of an adapter and expert: one product each.
        block_size = max(1, topk_ids.numel())
        return moe_lora_align_block_size(
            topk_ids, num_experts, block_size, self.token_mapping_meta, expert_map=expert_map
        )

    def add_lora_fused_moe(
        self,
        y: Tensor,
        x: Tensor,
        lora_a: Sequence[Tensor],
        lora_b: Sequence[Tensor],
        ranks: Tensor,
        scales: Tensor,
        column_starts: Sequence[int],
        blocks: MoEBlocks,
        *,
        routed_weights: Tensor | None = None,
        add_inputs: bool = True,
    ) -> None:
        fused_moe_lora(
            y, x, lora_a, lora_b, ranks, scales, column_starts, blocks, routed_weights=routed_weights,
            add_inputs=add_inputs,
        )  # fmt: skip


def _hidden(lora_a: Sequence[Tensor], rows: Tensor) -> Tensor:
    return torch.empty(
        len(lora_a), rows.shape[0], lora_a[0].shape[1], dtype=torch.float32, device=rows.device
    )
