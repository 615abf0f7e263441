"""What is checked on each rank of a group, on the CPU or on the GPU of its number.

test_parallel_layers.py and test_parallel_layers_gpu.py run it in processes of their own.
"""

import torch
from torch import Tensor

from executor.distributed import ParallelGroup
from executor.lora.arena import SlotArena
from executor.lora.config import LoRAConfig
from executor.lora.image import build_slot_image
from executor.lora.layout import SlotLayout
from kernels.metadata.meta import Run
from tests.unit.executor.lora.adapters import make_adapter, poison
from tests.unit.executor.lora.layer_cases import CASES, EVERY_KIND, MODEL_CONFIG, Rig, make_rig

RANKS = (1, 2, 3, 5, 8, 16)
MAX_RANK = 18  # neither 4 nor the adapters' ranks divide it
TOLERANCE = 2e-5
Sharding = tuple[str, bool]  # name of the case, fully sharded


def _rig(
    group: ParallelGroup, sharding: Sharding, max_loras: int, device: str, max_rank: int = MAX_RANK
) -> Rig:
    torch.manual_seed(7)
    name, fully_sharded = sharding
    rig = make_rig(name, max_loras, max_rank, group=group, fully_sharded=fully_sharded, device=device)
    case = CASES[name]
    twin = fully_sharded and group.size > 1 and case.sharded_class is not None
    assert type(rig.layer) is (case.sharded_class if twin else case.layer_class)
    return rig


def _compare(rig: Rig, runs: list[Run]) -> Tensor:
    """Every row equals the whole layer's; base rows equal this rank's base layer to the bit."""
    x = rig.inputs(sum(count for _, count in runs))
    y, base = rig.run(runs, x), rig.base(x)
    torch.testing.assert_close(y.double(), rig.expected(runs, x), rtol=TOLERANCE, atol=TOLERANCE)
    without = torch.tensor(
        [slot == -1 for slot, count in runs for _ in range(count)], dtype=torch.bool, device=x.device
    )
    assert torch.equal(y[without], base[without])
    return y


def mixed_ranks(group: ParallelGroup, sharding: Sharding, device: str = "cpu") -> None:
    """All ranks and base rows in one step, in some order; other steps after; slots never filled."""
    rig = _rig(group, sharding, len(RANKS) + 1, device)
    parts = len(rig.layer.module_names)
    for slot, rank in enumerate(RANKS):
        rig.put(slot, [rank] * parts)
    _compare(rig, [(5, 1), (-1, 2), *((slot, 1) for slot in range(6)), (0, 3), (-1, 1)])
    for runs in ([(-1, 3)], [(2, 1), (0, 1)], [], [(6, 2)], [(6, 1), (4, 2), (-1, 1)]):
        _compare(rig, runs)


def slots_lower_than_the_group(group: ParallelGroup, sharding: Sharding, device: str = "cpu") -> None:
    """One row of A at most on each rank, and on some none."""
    for max_rank in (1, 3):
        rig = _rig(group, sharding, max_rank + 1, device, max_rank)
        for slot in range(max_rank):
            rig.put(slot, [slot + 1] * len(rig.layer.module_names))
        _compare(rig, [*((slot, 2) for slot in range(max_rank)), (-1, 1), (max_rank, 1), (0, 1)])


def missing_parts(group: ParallelGroup, sharding: Sharding, device: str = "cpu") -> None:
    """Each part alone, and all but each, with ranks that differ between the parts."""
    rig = _rig(group, sharding, 2, device)
    parts = len(rig.layer.module_names)
    for chosen in range(parts):
        rig.put(0, [3 + part if part == chosen else 0 for part in range(parts)])
        rig.put(1, [0 if part == chosen else 5 - part for part in range(parts)])
        _compare(rig, [(0, 2), (-1, 1), (1, 2)])


def reused_slot(group: ParallelGroup, sharding: Sharding, device: str = "cpu") -> None:
    """A small adapter over a large one, twice, answers as in a cold slot; a reset slot as the base."""
    rig = _rig(group, sharding, 2, device)
    parts = len(rig.layer.module_names)
    rig.put(0, [2] + [0] * (parts - 1))
    small = rig.adapters[0]
    x = rig.inputs(4)
    cold = rig.run([(0, 4)], x)
    for _ in range(2):
        rig.put_over(1, [16] * parts)
        assert not torch.equal(rig.run([(1, 4)], x), cold)
        rig.set(1, small)
        assert torch.equal(rig.run([(1, 4)], x), cold)
    rig.layer.reset_lora(1)
    assert torch.equal(rig.run([(1, 4)], x), rig.base(x))


def image_in_arena(group: ParallelGroup, sharding: Sharding, device: str = "cpu") -> None:
    """An image that was cut on the host equals `set_lora` to the bit, also over a larger one; ranks below the
    group's size included."""
    rig = _rig(group, sharding, 2, device)
    config = LoRAConfig(2, MAX_RANK, EVERY_KIND, fully_sharded_loras=sharding[1])
    slices = [part.slot_slice for part in rig.layer.served_parts(config, MODEL_CONFIG)]
    arena = SlotArena(SlotLayout.on_rank(slices, config, group), 2, device)
    rig.layer.create_lora_weights(2, config, MODEL_CONFIG, arena=arena)
    x = rig.inputs(7)
    poison(arena, 0)
    poison(arena, 1)
    for rank in (18, 7, 3, 1):
        adapter = make_adapter(arena.layout, dict.fromkeys(rig.layer.module_names, rank), seed=rank)
        image = build_slot_image(adapter, arena.layout)
        arena.load(0, image)
        loaded = rig.run([(0, 4), (-1, 3)], x)
        modules = [adapter[module] for module in rig.layer.module_names]
        factors = [(torch.tensor(m.lora_a), torch.tensor(m.lora_b).T, m.scale) for m in modules]
        rig.set(1, [(a.to(device), b.to(device), scale) for a, b, scale in factors])
        assert torch.equal(loaded, rig.run([(1, 4), (-1, 3)], x))
        expected = rig.expected([(1, 4), (-1, 3)], x)
        torch.testing.assert_close(loaded.double(), expected, rtol=TOLERANCE, atol=TOLERANCE)
    arena.clear(0)
    assert torch.equal(rig.run([(0, 7)], x), rig.base(x))


EVERY_CHECK = (
    mixed_ranks, slots_lower_than_the_group, missing_parts, reused_slot, image_in_arena,
)  # fmt: skip


def layouts(group: ParallelGroup, sharding: Sharding) -> tuple[str, int]:
    """(layout's hash, elements of a slot)."""
    rig = _rig(group, sharding, 1, "cpu")
    config = LoRAConfig(1, MAX_RANK, EVERY_KIND, fully_sharded_loras=sharding[1])
    layout = SlotLayout.on_rank([part.slot_slice for part in rig.layer.served], config, group)
    return layout.slot_layout, layout.slot_elements


def collectives(group: ParallelGroup, device: str = "cpu") -> None:
    ranks = torch.arange(group.size, dtype=torch.float32, device=device)
    x = torch.full((2, 3), float(group.rank), device=device)
    assert group.all_gather(x).shape == (group.size, 2, 3)
    assert torch.equal(group.all_gather(x)[:, 1, 2], ranks)
    tokens = torch.full((3,), 7 + group.rank, device=device)
    assert group.broadcast(tokens) is tokens
    assert tokens.tolist() == [7] * 3
    for dtype in (torch.float32, torch.bfloat16):
        y = torch.full((2,), float(group.rank), dtype=dtype, device=device)
        assert group.all_reduce(y) is y
        assert y.tolist() == [sum(range(group.size))] * 2
