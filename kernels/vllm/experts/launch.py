"""Starts vLLM's expert kernels: forms and block sizes by shapes alone. It needs triton."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.launching.block_launch import slices_of
from kernels.launching.launch import Launch, row_signature, signature
from kernels.launching.moe_tuning import MOST_ONCE_RANKS, OnceConfig, PairConfig, choose
from kernels.tiles.device import has_dependent_launch
from kernels.vllm.experts.choices import Choices
from kernels.vllm.experts.kernels import moe_expand_kernel, moe_once_kernel, moe_shrink_kernel
from kernels.vllm.scaling import UNSCALED, Scaling

# Places of a part of a block, as of our own blocks (kernels/launching/moe_tuning.py): those of vLLM's
# default, 64, are cut into four, and parts without pairs end at once.
_PART = 16
# Ranks that a program holds at a time.
_MOST_RANKS = 64


@dataclass(frozen=True, slots=True)
class PersistentConfig:
    """One launch of no more than `programs` programs, which take the shares of `once` in turns: for choices
    that are not sorted."""

    once: OnceConfig
    programs: int


Config = PairConfig | OnceConfig | PersistentConfig


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """The step's blocks as kernels take them."""

    choices: Choices

    @property
    def rows(self) -> int:
        return 1 if self.choices.sorted_token_ids is None else _PART

    @property
    def entries(self) -> int:
        """Parts of blocks that any routing can fill. Each block holds a pair, and only the last one of an
        expert and slot is not full, for which a list has room, whatever its pairs."""
        of = self.choices
        if of.sorted_token_ids is None:
            return of.num_pairs
        full, room = of.num_pairs // of.block_size, of.expert_ids.shape[1]
        blocks = min(of.num_pairs, of.lists * room, full + 1 + of.lists * (room - full))
        return max(0, blocks) * -(-of.block_size // _PART)

    @property
    def likely_entries(self) -> int:
        """For the choice of forms: without parts that have no pair."""
        return min(self.entries, self.choices.num_pairs)

    @property
    def arguments(self) -> tuple[object, ...]:
        of = self.choices
        places = of.expert_ids if of.sorted_token_ids is None else of.sorted_token_ids
        post_pad = of.expert_ids if of.num_tokens_post_padded is None else of.num_tokens_post_padded
        blocks = 0 if of.sorted_token_ids is None else of.expert_ids.shape[1]
        tables = of.expert_ids, places, post_pad, of.lora_ids, of.adapter_enabled, of.token_lora_mapping
        return (*tables, of.lists, of.num_pairs, of.places, blocks)

    @property
    def constants(self) -> dict[str, object]:
        of = self.choices
        return {
            "MAX_LORAS": of.max_loras, "NUM_EXPERTS": of.num_experts, "TOPK": of.topk,
            "LISTS": max(2, triton.next_power_of_2(of.lora_ids.numel())), "ROWS": self.rows,
            "BLOCK": 1 if of.sorted_token_ids is None else of.block_size,
        }  # fmt: skip

    @property
    def form(self) -> Hashable:
        return tuple(
            (each.dtype, each.data_ptr() % 16) for each in self.arguments if isinstance(each, Tensor)
        )


def choose_config(
    choices: Choices, slices: int, width: int, rank: int, element_size: int, scaled: bool = False
) -> Config:
    """The form for a layer of `width` inputs: what pays for our own blocks of as many rows."""
    work = _Work(choices)
    block_rank = min(_MOST_RANKS, triton.next_power_of_2(max(8 if work.rows == 1 else 16, rank)))
    blocks = max(1, work.likely_entries)
    # A tile of FP8 values is as large as one of 16 bits once it is in registers.
    chosen = choose(work.rows, blocks, slices, width, rank, block_rank, max(2, element_size))
    if scaled and isinstance(chosen, OnceConfig):
        return PairConfig(block_rank, 128, 1, False, 4, 3, 128, 4)
    return chosen


def fused(
    y: Tensor,
    x: Tensor,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    choices: Choices,
    divide: int,
    start: int,
    routed: Tensor | None,
    add_inputs: bool,
    of_a: Scaling = UNSCALED,
    of_b: Scaling = UNSCALED,
    config: Config | None = None,
) -> None:
    """Shrink, then expand, as in kernels/vllm/experts/reference.py, with float32 between them."""
    rank, slices = lora_a[0].shape[2], len(lora_a)
    scaled = bool(of_a.weights or of_b.weights) or of_a.rows is not None or of_b.rows is not None
    if config is None:
        config = choose_config(choices, slices, x.shape[1], rank, x.element_size(), scaled)
    if not isinstance(config, PairConfig) and rank <= MOST_ONCE_RANKS and not scaled:
        _once(y, x, lora_a, lora_b, choices, divide, start, routed, add_inputs, config)
        return
    assert isinstance(config, PairConfig)
    h = torch.empty((config.split, slices, choices.num_pairs, rank), dtype=torch.float32, device=x.device)
    shrink(h, x, lora_a, choices, divide, False, of_a, config)
    expand(y, h, lora_b, choices, start, routed, add_inputs, False, of_b, config, early=True)


def shrink(
    h: Tensor,
    x: Tensor,
    lora_a: Sequence[Tensor],
    choices: Choices,
    divide: int,
    by_place: bool,
    of: Scaling = UNSCALED,
    config: PairConfig | None = None,
) -> None:
    """reference.shrink; h may have splits before its slices, which expand adds up."""
    a, work, slices = lora_a[0], _Work(choices), len(lora_a)
    rank, width = a.shape[2], a.shape[3]
    config = config or _whole(choices, slices, width, rank, x.element_size())
    block_k = _within_group(config.block_k, of.group_k) if of.by_inputs else config.block_k
    block_rank = min(config.block_rank, triton.next_power_of_2(max(16, rank)))
    tiles = -(-rank // block_rank)
    programs = tiles * config.split * slices * work.entries
    if programs == 0:
        return
    constants = {
        **work.constants, **_scales_of(of, a.shape[2], width), "K": width, "RANK": rank, "SLICES": slices,
        "DIVIDE": divide, "BLOCK_RANK": block_rank, "BLOCK_K": block_k, "SPLIT": config.split,
        "SORTED": by_place,
    }  # fmt: skip
    key = signature(*lora_a, *of.weights), row_signature(x), _rows(of), _rows_of(h), work.form
    launch = _launch(moe_shrink_kernel, constants, config.shrink_warps, config.shrink_stages, key)
    launch(
        (programs,), h, x, *slices_of(lora_a), *_scale_tensors(of, x), *work.arguments,
        h.numel() // (slices * config.split), x.stride(0), *a.stride()[:3], *_scale_strides(of),
    )  # fmt: skip


def expand(
    y: Tensor,
    h: Tensor,
    lora_b: Sequence[Tensor],
    choices: Choices,
    start: int,
    routed: Tensor | None,
    add_inputs: bool,
    by_place: bool,
    of: Scaling = UNSCALED,
    config: PairConfig | None = None,
    early: bool = False,
) -> None:
    """reference.expand; h as shrink has left it. Early: only shrink ran since the tables were written."""
    b, work, slices = lora_b[0], _Work(choices), len(lora_b)
    width, rank = b.shape[2], b.shape[3]
    config = config or _whole(choices, slices, width, rank, y.element_size())
    block_rank = min(config.block_rank, triton.next_power_of_2(max(16, rank)))
    block_rank = _within_group(block_rank, of.group_k) if of.by_inputs else block_rank
    block_n = min(config.block_n, triton.next_power_of_2(max(16, width)))
    programs = -(-width // block_n) * slices * work.entries
    if programs == 0:
        return
    constants = {
        **work.constants, **_scales_of(of, width, rank), "WIDTH": width, "RANK": rank, "SLICES": slices,
        "BLOCK_RANK": block_rank, "BLOCK_N": block_n, "SPLIT": config.split, "SORTED": by_place,
        "ADD_INPUTS": add_inputs, "ROUTED": routed is not None, "EARLY": early,
    }  # fmt: skip
    key = (
        signature(*lora_b, *of.weights),
        row_signature(y),
        _rows(of),
        _rows_of(h),
        _kind(routed),
        start,
        work.form,
    )
    launch = _launch(moe_expand_kernel, constants, config.expand_warps, 1, key)
    launch(
        (programs,), y, h, *slices_of(lora_b), y if routed is None else routed, *_scale_tensors(of, y),
        *work.arguments, h.numel() // (slices * config.split), y.stride(0), start, *b.stride()[:3],
        *_scale_strides(of),
    )  # fmt: skip


def _once(
    y: Tensor,
    x: Tensor,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    choices: Choices,
    divide: int,
    start: int,
    routed: Tensor | None,
    add_inputs: bool,
    form: OnceConfig | PersistentConfig,
) -> None:
    a, b, work, slices = lora_a[0], lora_b[0], _Work(choices), len(lora_a)
    config = form.once if isinstance(form, PersistentConfig) else form
    programs = config.chunks * slices * work.entries
    if programs == 0:
        return
    persistent = isinstance(form, PersistentConfig) and work.rows == 1
    if isinstance(form, PersistentConfig) and persistent:
        programs = min(programs, form.programs)
    least = 8 if work.rows == 1 else 16
    constants = {
        **work.constants, "K": a.shape[3], "WIDTH": b.shape[2], "RANK": a.shape[2], "SLICES": slices,
        "DIVIDE": divide, "BLOCK_RANK": max(least, triton.next_power_of_2(a.shape[2])),
        "BLOCK_K": config.block_k, "BLOCK_N": config.block_n, "CHUNKS": config.chunks,
        "COLUMN_STAGES": config.column_stages, "ADD_INPUTS": add_inputs, "ROUTED": routed is not None,
        "PERSISTENT": persistent,
    }  # fmt: skip
    key = signature(*lora_a, *lora_b), row_signature(x), row_signature(y), _kind(routed), start, work.form
    launch = _launch(moe_once_kernel, constants, config.num_warps, config.num_stages, key)
    launch(
        (programs,), y, x, *slices_of(lora_a), *slices_of(lora_b), y if routed is None else routed,
        *work.arguments, x.stride(0), y.stride(0), start, *a.stride()[:3], *b.stride()[:3],
    )  # fmt: skip


def _whole(choices: Choices, slices: int, width: int, rank: int, element_size: int) -> PairConfig:
    """A cache that the caller has between the two holds no splits: a program takes all inputs, in steps."""
    chosen = choose_config(choices, slices, width, rank, element_size, scaled=True)
    assert isinstance(chosen, PairConfig)
    return replace(chosen, split=1, block_k=min(512, chosen.block_k))


def _within_group(block: int, group: int) -> int:
    """The largest power of 2 up to `block` by which a group of scales can be divided."""
    return min(block, group & -group)


def _scales_of(of: Scaling, outputs: int, inputs: int) -> dict[str, object]:
    """Groups are compiled in only where they say something."""
    by_output = bool(of.weights) and of.weights[0].shape[2] > 1
    return {
        "SCALED": bool(of.weights), "K_SCALED": of.by_inputs, "X_SCALED": of.rows is not None,
        "GROUP_N": of.group_n if by_output else outputs, "GROUP_K": of.group_k if of.by_inputs else inputs,
    }  # fmt: skip


def _scale_tensors(of: Scaling, other: Tensor) -> tuple[Tensor, ...]:
    """x's scales and those of three slices; `other` where there are none, for nothing reads it."""
    weights = slices_of(of.weights) if of.weights else (other,) * 3
    return other if of.rows is None else of.rows, *weights


def _scale_strides(of: Scaling) -> tuple[int, ...]:
    """Row and group of x's scales; slot, expert, output and input of the weights'. 0: all alike."""
    rows = (0, 0)
    if of.rows is not None:
        rows = of.rows.stride(0) if len(of.rows) > 1 else 0, of.rows.stride(1) if of.rows.shape[1] > 1 else 0
    if not of.weights:
        return (*rows, 0, 0, 0, 0)
    first = of.weights[0]
    return (
        *rows,
        *(stride if size > 1 else 0 for size, stride in zip(first.shape, first.stride(), strict=True)),
    )


def _rows(of: Scaling) -> Hashable:
    return None if of.rows is None else (len(of.rows) > 1, row_signature(of.rows))


def _rows_of(h: Tensor) -> Hashable:
    return h.dtype, h.data_ptr() % 16


def _kind(tensor: Tensor | None) -> Hashable:
    return None if tensor is None else (tensor.dtype, tensor.data_ptr() % 16)


def _launch(
    kernel: Any, constants: Mapping[str, object], num_warps: int, num_stages: int, key: tuple[Any, ...]
) -> Launch:
    device = key[0][0][3]
    return _compiled(
        kernel, tuple(constants.items()), num_warps, num_stages, has_dependent_launch(device), key
    )


@lru_cache(maxsize=4096)
def _compiled(
    kernel: Any,
    constants: tuple[tuple[str, object], ...],
    num_warps: int,
    num_stages: int,
    pdl: bool,
    key: Hashable,
) -> Launch:
    """One start for all calls whose tensors are alike: `key` says in what."""
    options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": pdl}
    return Launch(kernel, {**dict(constants), "PDL": pdl}, options)
