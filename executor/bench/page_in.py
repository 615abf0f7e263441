"""Times of copying one adapter from pinned host memory into a slot.

It is on Llama-3.1-8B's seven projections, in bfloat16.
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median
from types import SimpleNamespace
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from adapter_store import LoRAModule
from executor.adapters.slot_writer import SideStreamWriter
from executor.lora.arena import SlotArena
from executor.lora.image import NUMPY_DTYPES, Buffer, SlotImage, build_slot_image
from executor.lora.layout import SlotLayout, SlotSlice
from kernels.punica import PunicaWrapperBase

LAYERS = 32
KINDS = {
    "q_proj": (4096, 4096),
    "k_proj": (4096, 1024),
    "v_proj": (4096, 1024),
    "o_proj": (4096, 4096),
    "gate_proj": (4096, 14336),
    "up_proj": (4096, 14336),
    "down_proj": (14336, 4096),
}
ROUNDS = 30
# What pinned copies of this size reach on an H100's bus (PCIe 5, 16 lanes).
BUS_RATE = 54e9


@dataclass(frozen=True, slots=True)
class Row:
    """`ours` from the start of the copy to the slot's last byte; `host_ms` in the engine's thread. The peer's
    figure is what its engine's loop stands still for."""

    workload: str
    adapters: int
    slots: int
    ours: float
    unit: str
    peer_default: str | None
    peer_best: str | None
    base_ours: None
    floor_ms: float
    scatter_ms: float
    host_ms: float


def run() -> Iterator[dict[str, object]]:
    for rank, max_rank in ((16, 16), (16, 64), (64, 64)):
        yield asdict(_measure(rank, max_rank))
        torch.cuda.empty_cache()


def _measure(rank: int, max_rank: int) -> Row:
    slices = tuple(SlotSlice(f"layers.{i}.{kind}", *KINDS[kind]) for i in range(LAYERS) for kind in KINDS)
    layout = SlotLayout(slices, max_rank, torch.bfloat16)
    arena = SlotArena(layout, 2, "cuda")
    punica = cast(PunicaWrapperBase, SimpleNamespace(set_slot_rank=lambda slot, rank: None))
    writer, image = SideStreamWriter(arena, punica), _image(layout, rank)
    side = writer.stream
    host, total, scatter = [], [], []
    block = image.block.cuda()
    for number in range(ROUNDS):
        begin, end, before, after = (torch.cuda.Event(enable_timing=True) for _ in range(4))  # type: ignore[no-untyped-call]
        begin.record(side)
        started = time.perf_counter()
        writer.load(number % 2, image)
        host.append((time.perf_counter() - started) * 1e3)
        end.record(side)
        before.record()
        arena.enter(number % 2, block)
        after.record()
        torch.cuda.synchronize()
        total.append(begin.elapsed_time(end))
        scatter.append(before.elapsed_time(after))
    nbytes = image.nbytes
    return Row(
        workload=f"page-in of {nbytes / 1e6:.0f} MB: rank {rank} in a slot of rank {max_rank}",
        adapters=1,
        slots=2,
        ours=median(total),
        unit="ms",
        peer_default="30-130" if (rank, max_rank) == (16, 16) else None,
        peer_best=None,
        base_ours=None,
        floor_ms=nbytes / BUS_RATE * 1e3,
        scatter_ms=median(scatter),
        host_ms=median(host),
    )


def _image(layout: SlotLayout, rank: int) -> SlotImage:
    """Weights without a file behind them."""
    random = np.random.default_rng(0)
    values = torch.from_numpy(random.standard_normal(rank * 14336, np.float32)).bfloat16()

    def factor(width: int) -> npt.NDArray[np.generic]:
        bits = values[: rank * width].view(torch.int16).numpy()
        return bits.view(NUMPY_DTYPES[torch.bfloat16]).reshape(rank, width)

    modules = {
        part.module: LoRAModule(part.module, rank, 2.0, factor(part.in_features), factor(part.out_features))
        for part in layout.slices
    }

    def allocate(nbytes: int) -> Buffer:
        array: Buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        return array

    return build_slot_image(modules, layout, allocate)
