"""Pieces that all Triton kernels share: work entries, rows, overlapping launches. Needs triton."""

from functools import lru_cache

import torch
import triton
import triton.language as tl


@lru_cache
def has_dependent_launch(device: torch.device) -> bool:
    """Programmatic dependent launch: a kernel starts while the one before it still runs. From sm_90 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def let_next_kernel_start(PDL: tl.constexpr):
    """Let the next kernel begin with what does not depend on this one: its work list and its weights.

    So nothing that a launch reads before its wait (weights, ranks, scales, metadata) may be written by one of
    the two kernels before it in the stream. Copies and events are full barriers, and so is any third kernel.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_former_kernel(PDL: tl.constexpr):
    """Every program must pass here, also one with nothing to do: this kernel's end vouches for it. And before
    it writes anything: the kernel before may still read what had the memory then."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def load_item(work, index, num_rows, MAX_LORAS: tl.constexpr):
    """(slot, first place, rows, part) of a work list's entry; rows is 0 for an idle or impossible entry."""
    entry = work + index * 4
    slot = tl.load(entry)
    start = tl.load(entry + 1)
    count = tl.load(entry + 2)
    part = tl.load(entry + 3)
    possible = (slot >= 0) & (slot < MAX_LORAS) & (start >= 0) & (start + count <= num_rows)
    return slot, start, tl.where(possible, count, 0), part


@triton.jit
def load_rows(order, start, count, ROWS: tl.constexpr):
    """int64 row numbers of an item's places: a scalar for one-row items, else [ROWS]."""
    if ROWS == 1:
        return tl.load(order + start).to(tl.int64)
    else:
        place = tl.arange(0, ROWS)
        return tl.load(order + start + place, mask=place < count, other=0).to(tl.int64)


@triton.jit
def of_slice(s, first, second, third, SLICES: tl.constexpr):
    """The s-th of three values or pointers; s may be a tensor."""
    chosen = first
    if SLICES > 1:
        chosen = tl.where(s == 1, second, chosen)
    if SLICES > 2:
        chosen = tl.where(s == 2, third, chosen)
    return chosen
