"""What vLLM's expert operations are given of a step's choices, of scales and of a layer, checked."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.launching.checks import check, check_same_device
from kernels.metadata.launch_plan import MAX_SLICES


class BlockSizeError(KernelArgumentError, AssertionError):
    """The reference asserts this one: whoever catches its error catches ours."""


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """Pair p = token * topk + k is a token's k-th choice of an expert. Each is of one slot, or of none.

    sorted_token_ids  int32 [slots, places], as moe_lora_align_block_size leaves it, with expert_ids
                  [slots, blocks] and num_tokens_post_padded [slots]. Each block in use holds a pair
    sorted_token_ids  None: pair p's expert is expert_ids[p], and its slot that of token_lora_mapping
    lora_ids      int32 [any]: the slots of the first `lists` entries are served; others are no slot or idle
    adapter_enabled   integers [max_loras or more]; 0: the slot is not served
    block_size    places of a block, a power of 2 from 16 up
    """

    topk: int
    num_pairs: int
    sorted_token_ids: Tensor | None
    expert_ids: Tensor
    num_tokens_post_padded: Tensor | None
    token_lora_mapping: Tensor
    lora_ids: Tensor
    lists: int
    adapter_enabled: Tensor
    block_size: int
    max_loras: int
    num_experts: int

    @classmethod
    def of(
        cls,
        stack: Sequence[Tensor],
        topk_weights: Tensor,
        sorted_token_ids: Tensor | None,
        expert_ids: Tensor,
        num_tokens_post_padded: Tensor | None,
        token_lora_mapping: Tensor,
        top_k_num: int,
        lora_ids: Tensor,
        num_active_loras: int,
        adapter_enabled: Tensor,
        block_size: int,
    ) -> "Choices":
        """For the slots and experts of a stack."""
        fits = topk_weights.dim() == 2 and topk_weights.shape[1] == top_k_num > 0
        check(fits, "topk_weights", f"must be [tokens, {top_k_num}], is {list(topk_weights.shape)}")
        fits = 0 < len(stack) <= MAX_SLICES and stack[0].dim() == 4
        check(fits, "lora_a_stacked", f"must hold 1 to {MAX_SLICES} slices [max_loras, experts, rank, in]")
        return cls(
            top_k_num, topk_weights.numel(), sorted_token_ids, expert_ids, num_tokens_post_padded,
            token_lora_mapping, lora_ids, min(num_active_loras, lora_ids.numel()), adapter_enabled,
            block_size, *stack[0].shape[:2],
        )  # fmt: skip

    @property
    def places(self) -> int:
        """Places of one slot, or, unsorted, pairs."""
        return self.num_pairs if self.sorted_token_ids is None else self.sorted_token_ids.shape[1]

    def check(self, device: torch.device) -> None:
        flags, mapping = self.adapter_enabled, self.token_lora_mapping
        fits = flags.is_contiguous() and flags.numel() >= self.max_loras
        check(fits, "adapter_enabled", f"must be contiguous with {self.max_loras} values or more")
        check_same_device(device, adapter_enabled=flags, expert_ids=self.expert_ids)
        whole = not self.expert_ids.is_floating_point() and self.expert_ids.is_contiguous()
        check(whole, "expert_ids", "must be contiguous integers")
        if self.sorted_token_ids is None:
            check_indices("token_lora_mapping", mapping, -(-self.num_pairs // self.topk), device)
            fits = self.expert_ids.dim() == 1 and self.expert_ids.numel() >= self.num_pairs
            check(fits, "expert_ids", f"must be [{self.num_pairs} pairs] where no sorted_token_ids are")
        else:
            self._check_tables(self.sorted_token_ids, device)

    def _check_tables(self, places: Tensor, device: torch.device) -> None:
        check_indices("lora_ids", self.lora_ids, 0, device)
        fits = places.dim() == 2 and places.shape[0] >= self.max_loras
        check(fits, "sorted_token_ids", f"must be [{self.max_loras} slots, places]")
        check_indices("sorted_token_ids", places, 0, device)
        fits = self.expert_ids.dim() == 2 and self.expert_ids.shape[0] == places.shape[0]
        check(fits, "expert_ids", f"must be [{places.shape[0]} slots, blocks], as sorted_token_ids")
        post_pad = self.num_tokens_post_padded
        if post_pad is None:
            raise KernelArgumentError("num_tokens_post_padded", "is missing beside sorted_token_ids")
        check_indices("num_tokens_post_padded", post_pad, self.max_loras, device)
        if self.block_size < 16 or self.block_size & (self.block_size - 1):
            raise BlockSizeError(
                "shrink_block_size_m", f"must be a power of 2 from 16 up, is {self.block_size}"
            )

    def blocks(self) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """(slot, expert, places, pairs) of each block; reads the tensors, so not for those of a GPU."""
        enabled, experts = self.adapter_enabled.tolist(), self.expert_ids.tolist()
        if self.sorted_token_ids is None:
            for pair in range(self.num_pairs):
                slot, expert = int(self.token_lora_mapping[pair // self.topk]), experts[pair]
                if 0 <= slot < self.max_loras and enabled[slot] and 0 <= expert < self.num_experts:
                    yield slot, expert, torch.tensor([pair]), torch.tensor([pair])
            return
        assert self.num_tokens_post_padded is not None
        size = self.block_size
        for slot in self.lora_ids[: self.lists].tolist():
            if not 0 <= slot < self.max_loras or not enabled[slot]:
                continue
            used = -(-int(self.num_tokens_post_padded[slot]) // size)
            for block, expert in enumerate(experts[slot][:used]):
                pairs = self.sorted_token_ids[slot, block * size : (block + 1) * size].long()
                there = (pairs >= 0) & (pairs < self.num_pairs)
                if 0 <= expert < self.num_experts:
                    yield slot, expert, block * size + there.nonzero().view(-1), pairs[there]


def check_indices(argument: str, tensor: Tensor, least: int, device: torch.device) -> None:
    fits = tensor.dtype == torch.int32 and tensor.is_contiguous() and tensor.numel() >= least
    check(fits, argument, f"must be contiguous int32 with {least} values or more")
    check_same_device(device, **{argument: tensor})


def check_stack(stack: Sequence[Tensor], argument: str, device: torch.device) -> None:
    """Slices [max_loras, experts, outputs, inputs] alike in all but where they lie; inputs are contiguous."""
    fits = 0 < len(stack) <= MAX_SLICES and stack[0].dim() == 4
    check(fits, argument, f"must hold 1 to {MAX_SLICES} slices [max_loras, experts, outputs, inputs]")
    for index, weight in enumerate(stack):
        name, first = f"{argument}[{index}]", stack[0]
        alike = weight.shape == first.shape and weight.stride() == first.stride()
        check(alike and weight.dtype == first.dtype, name, "has another shape, stride or type than slice 0")
        check(weight.stride(3) == 1, name, "must have contiguous rows (stride 1 along the last dimension)")
        check(weight.stride(2) * weight.shape[2] < 2**31, name, "has experts of 2^31 elements or more")
        check_same_device(device, **{name: weight})


def check_shrink(
    x: Tensor, lora_a: Sequence[Tensor], choices: Choices, divide: int, device: torch.device
) -> None:
    """What shrink takes, but for types."""
    choices.check(device)
    check_stack(lora_a, "lora_a_stacked", device)
    rows, width = -(-choices.num_pairs // divide), lora_a[0].shape[3]
    fits = x.dim() == 2 and x.shape[0] >= rows and x.shape[1] >= width
    check(fits, "qcurr_hidden_states", f"must be [{rows}, {width}] or larger, is {list(x.shape)}")
    check(x.stride(1) == 1, "qcurr_hidden_states", f"must have contiguous rows, has strides {x.stride()}")
    check_same_device(device, qcurr_hidden_states=x)


def check_expand(
    output: Tensor, lora_b: Sequence[Tensor], choices: Choices, topk_weights: Tensor, start: int
) -> None:
    """What expand takes, but for types."""
    choices.check(output.device)
    check_stack(lora_b, "lora_b_stacked", output.device)
    same = lora_b[0].shape[:2] == (choices.max_loras, choices.num_experts)
    check(same, "lora_b_stacked", "has other slots or experts than lora_a_stacked")
    tokens, topk = topk_weights.shape
    fits = output.dim() == 3 and output.shape[:2] == (tokens, topk) and output.is_floating_point()
    check(fits, "output", f"must be floating [{tokens}, {topk}, columns], is {list(output.shape)}")
    rows = output.stride(2) == 1 and (tokens <= 1 or output.stride(0) == topk * output.stride(1))
    check(rows, "output", f"must have its pairs one stride apart, has strides {output.stride()}")
    ends = start + len(lora_b) * lora_b[0].shape[2]
    inside = start >= 0 and ends <= output.shape[2]
    check(inside, "offset", f"{start}..{ends} exceed the {output.shape[2]} columns of output")
    whole = topk_weights.is_floating_point() and topk_weights.is_contiguous()
    check(whole, "topk_weights", "must be contiguous and floating")
    check_same_device(output.device, topk_weights=topk_weights)


def hidden(cache: Tensor, choices: Choices, by_place: bool, slices: int, rank: int) -> Tensor:
    """The cache between shrink and expand as [slices, rows, rank]: a row a pair, or a place of all slots."""
    tokens = -(-choices.num_pairs // choices.topk)
    rows = (choices.max_loras, choices.places) if by_place else (tokens, choices.topk)
    expected = (slices, *rows, rank)
    fits = tuple(cache.shape) == expected and cache.is_contiguous() and cache.is_floating_point()
    check(fits, "a_intermediate_cache1", f"must be contiguous {list(expected)}, is {list(cache.shape)}")
    return cache.flatten(1, 2)
