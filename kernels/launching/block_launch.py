"""What the launchers over blocks share: where blocks come from, and their stacks as kernel arguments."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kernels.launching.checks import check
from kernels.launching.moe_blocks import MoEBlocks
from kernels.metadata.launch_plan import MAX_SLICES, ROWS_PER_TILE
from kernels.metadata.meta import LoRAKernelMeta

# The kinds of kernels/tiles/block_tile.py.
_ITEMS, _BLOCKS, _PAIRS = 0, 1, 2


@dataclass(frozen=True, slots=True)
class BlockWork:
    """`entries` blocks of up to `rows` rows each; h has `places` rows. The tensors are load_block's."""

    kind: int
    entries: int
    rows: int
    places: int
    work: Tensor
    ids: Tensor
    row_slots: Tensor
    expert_map: Tensor | None
    topk: int
    num_experts: int
    max_loras: int

    @classmethod
    def of_choices(cls, blocks: MoEBlocks) -> "BlockWork":
        """Expert choices. Without row slots all are of slot 0, which only a table can say."""
        kind, work, places = _BLOCKS, blocks.blocks, len(blocks.sorted_ids)
        entries, rows = len(blocks.blocks), max(16, 1 << (blocks.block_size - 1).bit_length())
        if blocks.block_size == 1:
            rows = 1
        if not blocks.aligned:
            kind, work, places, entries = _PAIRS, blocks.topk_ids, blocks.num_pairs, blocks.num_pairs
        row_slots = work if blocks.row_slots is None else blocks.row_slots
        return cls(
            kind, entries, rows, places, work, blocks.sorted_ids, row_slots, blocks.expert_map, blocks.topk,
            blocks.num_experts, blocks.num_slots,
        )  # fmt: skip

    @classmethod
    def of_rows(cls, meta: LoRAKernelMeta, rows: int) -> "BlockWork":
        """The step's rows, as the plan cuts them: entries of `rows` rows, 64 only where it has tiles."""
        tiled = rows == ROWS_PER_TILE and meta.plan.tiles > 0
        given = ROWS_PER_TILE if tiled else meta.plan.rows_per_item
        check(rows == given, "config", f"is for entries of {rows} rows, the step's have {given}")
        work, entries = (meta.tiles, meta.plan.tiles) if tiled else (meta.items, meta.plan.items)
        order = meta.token_indices_sorted_by_lora_ids
        return cls(_ITEMS, entries, rows, meta.num_rows, work, order, order, None, 1, 1, meta.max_loras)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """work, ids, row_slots, expert_map."""
        return self.work, self.ids, self.row_slots, self.ids if self.expert_map is None else self.expert_map

    @property
    def known(self) -> int:
        return self.num_experts if self.expert_map is None else len(self.expert_map)

    @property
    def constants(self) -> dict[str, object]:
        return {
            "KIND": self.kind, "ROWS": self.rows, "TOPK": self.topk, "NUM_EXPERTS": self.num_experts,
            "MAX_LORAS": self.max_loras, "HAS_MAP": self.expert_map is not None,
        }  # fmt: skip


def offsets(stack: Sequence[Tensor]) -> tuple[int, int]:
    """Elements from the first slice to the second and third: views of one arena, or of one memory."""
    first = stack[0]
    others = [(weight.data_ptr() - first.data_ptr()) // first.element_size() for weight in stack[1:]]
    return (*others, 0, 0)[:2]  # type: ignore[return-value]


def slices_of(stack: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Three pointers, whatever the number of slices."""
    return stack[0], stack[min(1, len(stack) - 1)], stack[-1]


def strides_of(stack: Sequence[Tensor], dim: int) -> tuple[int, ...]:
    return tuple(weight.stride(dim) for weight in slices_of(stack))


def widths_and_starts(stack: Sequence[Tensor], starts: Sequence[int]) -> dict[str, int]:
    missing = [0] * (MAX_SLICES - len(stack))
    widths = [weight.shape[-1] for weight in stack] + missing
    return {
        **{f"WIDTH{s}": width for s, width in enumerate(widths)},
        **{f"START{s}": start for s, start in enumerate([*starts, *missing])},
    }


def column_tiles(stack: Sequence[Tensor], block_n: int) -> int:
    return sum(-(-weight.shape[-1] // block_n) for weight in stack)


def columns_side_by_side(single: bool, block_n: int, num_warps: int) -> int:
    """Expand's VECTOR for FP8. A rank for all threads of a single row: the sum over ranks stays within a
    thread. In tiles the 8 columns of y that a thread loads at once decide."""
    return max(1, min(16, block_n // (32 * num_warps))) if single else 8


def check_arena(stack: Sequence[Tensor], argument: str) -> None:
    """What the kernels ask beyond the references: one slot stride, one type, experts below 2^31."""
    check(len(stack) <= MAX_SLICES, argument, f"holds {len(stack)} slices, at most {MAX_SLICES} are served")
    for index, weight in enumerate(stack):
        alike = weight.stride(0) == stack[0].stride(0) and weight.dtype == stack[0].dtype
        check(alike, f"{argument}[{index}]", "has another slot stride or dtype than slice 0")
        small = weight.stride(-2) * weight.shape[-2] < 2**31
        check(small, f"{argument}[{index}]", "has experts of 2^31 elements or more")
