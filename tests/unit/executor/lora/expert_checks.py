"""What is checked of experts with LoRA on each rank of a group, on torch's default device; run by
test_expert_layers.py and test_expert_layers_gpu.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from adapter_store import LoRAModule
from executor.distributed import SINGLE, ParallelGroup
from executor.layers.fused_moe import FusedMoE
from executor.layers.fused_moe_router import Routing, route
from executor.layers.model_config import MoEConfig, SwiGLULimits
from executor.lora import layers as lora
from executor.lora.arena import SlotArena
from executor.lora.config import LoRAConfig
from executor.lora.image import build_slot_image
from executor.lora.layout import SlotLayout
from executor.lora.quantize import quantize
from executor.lora.replace import class_for
from kernels.metadata.meta import LoRAMapping, Run
from kernels.punica import PunicaWrapperBase, PunicaWrapperCPU
from tests.unit.executor.lora.adapters import poison

HIDDEN, INNER, EXPERTS, TOP_K = 20, 12, 4, 2
RANKS = (1, 2, 3, 5, 8)
MAX_RANK = 10  # 4 ranks do not divide it
TOLERANCE = 2e-5
Wrapper = Callable[[int, int, str], PunicaWrapperBase]
Factors = tuple[Tensor, Tensor, float]  # A [experts, r, in], B [experts, out, r], scale


@dataclass(frozen=True)
class Form:
    interleaved: bool = False  # as gpt-oss: also with biases and its activation
    fully_sharded: bool = False
    expert_parallel: bool = False
    side_by_side: bool = False  # one pair for gate and up, in B one after the other
    gated: bool = True

    @property
    def moe(self) -> MoEConfig:
        special = SwiGLULimits(1.702, 1.0) if self.interleaved else None
        return MoEConfig(
            (True,), EXPERTS, TOP_K, INNER, True, biases=self.interleaved or not self.gated,
            interleaved=self.interleaved, clamped=special, expert_parallel=self.expert_parallel,
            gated=self.gated,
        )  # fmt: skip

    @property
    def one_pair(self) -> bool:
        return self.interleaved or self.side_by_side

    @property
    def names(self) -> tuple[str, ...]:
        matrices = ("w13", "w2") if self.one_pair else ("w1", "w2", "w3") if self.gated else ("w1", "w2")
        return tuple(f"layers.0.experts.{matrix}" for matrix in matrices)

    @property
    def layer_class(self) -> type[lora.BaseLayerWithLoRA]:
        if self.one_pair:
            return lora.FusedMoE3DWithShardedLoRA if self.fully_sharded else lora.FusedMoE3DWithLoRA
        return lora.FusedMoEWithShardedLoRA if self.fully_sharded else lora.FusedMoEWithLoRA


FORMS = {
    "w1, w2, w3": Form(),
    "w13, w2": Form(interleaved=True),
    "w1, w2, w3, sharded": Form(fully_sharded=True),
    "w13, w2, sharded": Form(interleaved=True, fully_sharded=True),
    "w1, w2, w3, shared out": Form(expert_parallel=True),
    "w13, w2, shared out": Form(interleaved=True, expert_parallel=True),
    "w13, w2, side by side": Form(side_by_side=True),
    "w13, w2, side by side, sharded": Form(side_by_side=True, fully_sharded=True),
    "w1, w2": Form(gated=False),
    "w1, w2, sharded": Form(gated=False, fully_sharded=True),
}


@dataclass
class Rig:
    form: Form
    layer: lora.FusedMoEWithLoRA
    whole: FusedMoE
    punica: PunicaWrapperBase
    adapters: dict[int, list[Factors | None]] = field(default_factory=dict)

    def draw(self, ranks: Sequence[int], scale: float = 0.5) -> list[Factors | None]:
        """Random factors of these ranks, one a module (0: absent)."""
        factors: list[Factors | None] = []
        for number, (rank, part) in enumerate(zip(ranks, self.layer.all_parts, strict=True)):
            wide, high = part.slot_slice.in_features, part.slot_slice.out_features
            a = torch.randn(EXPERTS, rank, wide) / wide**0.5
            b = torch.randn(EXPERTS, high, rank) / max(rank, 1) ** 0.5
            factors.append((a, b, scale + number) if rank else None)
        return factors

    def put(self, slot: int, factors: list[Factors | None]) -> None:
        """Over NaN, so that whatever is read beyond a rank shows."""
        for view in (*self.layer.stacked.lora_a, *self.layer.stacked.lora_b):
            view[slot] = torch.nan
        self.set(slot, factors)

    def set(self, slot: int, factors: list[Factors | None]) -> None:
        self.adapters[slot] = factors
        self.layer.set_lora(
            slot,
            [f and f[0] for f in factors],
            [f and f[1] for f in factors],
            [f[2] if f else 1.0 for f in factors],
        )

    def run(self, runs: Sequence[Run], x: Tensor, routing: Routing) -> Tensor:
        self.punica.update_metadata(LoRAMapping(tuple(runs), tuple(runs)))
        out: Tensor = self.layer(x, routing)
        return out

    def expected(self, runs: Sequence[Run], x: Tensor, routing: Routing) -> Tensor:
        """In float64, row by row and expert by expert, each with its merged matrices."""
        slots = [slot for slot, count in runs for _ in range(count)]
        rows = [
            sum(
                weight * self._expert(int(expert), slot, row.double())
                for expert, weight in zip(experts, weights.double(), strict=True)
            )
            for slot, row, experts, weights in zip(slots, x, routing.ids, routing.weights, strict=True)
        ]
        return torch.stack(rows) if rows else x.double()  # type: ignore[arg-type]

    def _expert(self, expert: int, slot: int, x: Tensor) -> Tensor:
        whole, deltas = self.whole, self._deltas(expert, slot)
        h = whole.w13[expert].double() @ x + deltas[0] @ x
        if whole.w13_bias is not None:
            h = h + whole.w13_bias[expert].double()
        inner = whole.act_fn(h)
        y = whole.w2[expert].double() @ inner + deltas[1] @ inner
        return y if whole.w2_bias is None else y + whole.w2_bias[expert].double()

    def _deltas(self, expert: int, slot: int) -> tuple[Tensor, Tensor]:
        """Of gate over up, and of down."""
        factors = self.adapters.get(slot, [None] * len(self.form.names))
        sizes = [(p.slot_slice.out_features, p.slot_slice.in_features) for p in self.layer.all_parts]
        full = [
            f[2] * f[1][expert].double() @ f[0][expert].double() if f else torch.zeros(size).double()
            for f, size in zip(factors, sizes, strict=True)
        ]
        if self.form.interleaved:
            return torch.cat((full[0][::2], full[0][1::2])), full[1]
        if len(full) == 2:
            return full[0], full[1]
        return torch.cat((full[0], full[2])), full[1]


def make_rig(
    group: ParallelGroup,
    name: str,
    max_loras: int,
    wrapper: Wrapper | None = None,
    dtype: torch.dtype = torch.float32,
    max_rank: int = MAX_RANK,
) -> Rig:
    """Ranks that seed torch's generator alike have parts of one layer."""
    torch.manual_seed(7)
    form = FORMS[name]
    whole = FusedMoE(HIDDEN, form.moe, SINGLE)
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.3)
    base = FusedMoE(HIDDEN, form.moe, group)
    own, inner = slice(base.expert_range.start, base.expert_range.stop), base.intermediate_range
    rows = [start + row for start in range(0, whole.w13.shape[1], INNER) for row in inner]
    base.w13.copy_(whole.w13[own][:, rows])
    base.w2.copy_(whole.w2[own][:, :, inner.start : inner.stop])
    for mine, every, columns in ((base.w13_bias, whole.w13_bias, rows), (base.w2_bias, whole.w2_bias, None)):
        if mine is not None and every is not None:
            mine.copy_(every[own] if columns is None else every[own][:, columns])
    config = LoRAConfig(max_loras, max_rank, frozenset({"experts"}), dtype, form.fully_sharded)
    chosen = class_for(base, config, form.names)
    sharded = form.fully_sharded and group.size > 1
    assert chosen is replace(form, fully_sharded=sharded).layer_class
    layer = chosen(base, form.names)
    assert isinstance(layer, lora.FusedMoEWithLoRA)
    layer.create_lora_weights(max_loras, config)
    layer.set_mapping(punica := (wrapper or _wrapper())(max_loras, 64, _device()))
    return Rig(form, layer, whole, punica)


def _device() -> str:
    return str(torch.get_default_device())


def _wrapper() -> Wrapper:
    if _device() == "cpu":
        return PunicaWrapperCPU
    from kernels.punica_gpu import PunicaWrapperGPU

    return PunicaWrapperGPU


def on_gpu(group: ParallelGroup, check: Callable[[ParallelGroup, str], None], name: str) -> None:
    """On the rank's own."""
    with torch.device("cuda", torch.cuda.current_device()):
        check(group, name)


def compare(rig: Rig, runs: list[Run], experts: Sequence[int] | None = None) -> Tensor:
    """Every row equals the whole layer's; base rows equal this rank's base layer to the bit. All rows go to
    `experts` when they are given."""
    rows = sum(count for _, count in runs)
    x = torch.randn(rows, HIDDEN)
    routing = route(torch.randn(rows, EXPERTS), TOP_K, renormalize=True)
    if experts is not None:
        routing = Routing(torch.tensor([experts] * rows).view(rows, TOP_K), routing.weights)
    y, base = rig.run(runs, x, routing), rig.layer.base_layer(x, routing)
    torch.testing.assert_close(y.double(), rig.expected(runs, x, routing), rtol=TOLERANCE, atol=TOLERANCE)
    without = torch.tensor([slot == -1 for slot, count in runs for _ in range(count)], dtype=torch.bool)
    assert torch.equal(y[without], base[without])
    return y


def mixed_ranks(group: ParallelGroup, name: str, wrapper: Wrapper | None = None) -> None:
    """All ranks and base rows in one step, in some order; other steps after; slots never filled; all rows at
    one pair of experts, and so some experts without a row."""
    rig = make_rig(group, name, len(RANKS) + 1, wrapper)
    modules = len(rig.form.names)
    for slot, rank in enumerate(RANKS):
        rig.put(slot, rig.draw([rank] * modules))
    assert (rig.layer.stacked.ranks > 0).any(0).tolist() == [True] * len(RANKS) + [False]
    everything = [(4, 1), (-1, 2), *((slot, 2) for slot in range(5)), (0, 3), (-1, 1)]
    compare(rig, everything)
    compare(rig, everything, experts=(2, 3))
    for runs in ([(-1, 3)], [(2, 1), (0, 1)], [(5, 2)], [(5, 1), (4, 2), (-1, 1)]):
        compare(rig, runs)


def slots_lower_than_the_group(group: ParallelGroup, name: str) -> None:
    """One row of A at most on each rank, and on some none."""
    for max_rank in (1, 3):
        rig = make_rig(group, name, max_rank + 1, max_rank=max_rank)
        for slot in range(max_rank):
            rig.put(slot, rig.draw([slot + 1] * len(rig.form.names)))
        compare(rig, [*((slot, 2) for slot in range(max_rank)), (-1, 1), (max_rank, 1), (0, 1)])


def missing_modules(group: ParallelGroup, name: str) -> None:
    """Each module alone, and all but each, with ranks that differ between them."""
    rig = make_rig(group, name, 2)
    modules = len(rig.form.names)
    for chosen in range(modules):
        rig.put(0, rig.draw([3 + number if number == chosen else 0 for number in range(modules)]))
        rig.put(1, rig.draw([0 if number == chosen else 5 - number for number in range(modules)]))
        compare(rig, [(0, 4), (-1, 1), (1, 4)])


def reused_slot(group: ParallelGroup, name: str) -> None:
    """A small adapter over a large one answers as in a cold slot; a reset slot as the base."""
    rig = make_rig(group, name, 2)
    modules = len(rig.form.names)
    rig.put(0, rig.draw([2] + [0] * (modules - 1)))
    small, x = rig.adapters[0], torch.randn(5, HIDDEN)
    routing = route(torch.randn(5, EXPERTS), TOP_K, renormalize=True)
    cold = rig.run([(0, 5)], x, routing)
    rig.set(1, rig.draw([MAX_RANK] * modules))
    assert not torch.equal(rig.run([(1, 5)], x, routing), cold)
    rig.set(1, small)
    assert torch.equal(rig.run([(1, 5)], x, routing), cold)
    rig.layer.reset_lora(1)
    assert (rig.layer.stacked.ranks > 0).any(0).tolist() == [True, False]
    assert torch.equal(rig.run([(1, 5)], x, routing), rig.layer.base_layer(x, routing))


def image_in_arena(group: ParallelGroup, name: str) -> None:
    """An image that was cut on the host equals `set_lora` to the bit, also over a larger one."""
    rig = make_rig(group, name, 2)
    config = LoRAConfig(2, MAX_RANK, frozenset({"experts"}), fully_sharded_loras=rig.form.fully_sharded)
    slices = [part.slot_slice for part in rig.layer.served_parts(config)]
    arena = SlotArena(SlotLayout.on_rank(slices, config, group), 2, _device())
    rig.layer.create_lora_weights(2, config, arena=arena)
    x, routing = torch.randn(7, HIDDEN), route(torch.randn(7, EXPERTS), TOP_K, renormalize=True)
    poison(arena, 0)
    poison(arena, 1)
    runs = [(0, 4), (-1, 3)]
    for rank in (MAX_RANK, 3, 1):
        factors = rig.draw([rank] * len(rig.form.names))
        arena.load(0, build_slot_image(_as_stored(rig, factors), arena.layout))
        loaded = rig.run(runs, x, routing)
        rig.set(1, factors)
        assert torch.equal(loaded, rig.run([(1, 4), (-1, 3)], x, routing))
        expected = rig.expected([(1, 4), (-1, 3)], x, routing)
        torch.testing.assert_close(loaded.double(), expected, rtol=TOLERANCE, atol=TOLERANCE)
    arena.clear(0)
    assert torch.equal(rig.run([(0, 7)], x, routing), rig.layer.base_layer(x, routing))


def fp8_slots(group: ParallelGroup, name: str, wrapper: Wrapper | None = None) -> None:
    """What experts add is that of the rounded factors, off by FP8's rounding of both (0.028 to 0.1, of few
    rows behind a nonlinear function); an image equals `set_lora` to the bit."""
    for dtype, largest in ((torch.float8_e4m3fn, 0.06), (torch.float8_e5m2, 0.12)):
        rig = make_rig(group, name, 2, wrapper, dtype)
        config = LoRAConfig(2, MAX_RANK, frozenset({"experts"}), dtype)
        slices = [part.slot_slice for part in rig.layer.served_parts(config)]
        arena = SlotArena(SlotLayout.on_rank(slices, config, group), 2, _device())
        rig.layer.create_lora_weights(2, config, arena=arena)
        x, routing = torch.randn(7, HIDDEN), route(torch.randn(7, EXPERTS), TOP_K, renormalize=True)
        rig.put(1, factors := rig.draw([3, *[MAX_RANK] * (len(rig.form.names) - 1)]))
        image = build_slot_image(_as_stored(rig, factors), arena.layout)
        assert 0.01 < image.error < largest
        arena.load(0, image)
        runs = [(1, 4), (-1, 3)]
        y, base = rig.run(runs, x, routing), rig.layer.base_layer(x, routing)
        assert torch.equal(y, rig.run([(0, 4), (-1, 3)], x, routing))
        assert torch.equal(y[4:], base[4:])
        wanted = rig.expected(runs, x, routing)[:4] - base[:4]
        missed = (y[:4] - base[:4] - wanted).norm() / wanted.norm()
        assert missed > 0.005, (dtype, missed)
        rig.adapters[1] = [
            f and _as_ranks_keep(f, rig.form, name.endswith("w2"), group.size, dtype)
            for name, f in zip(rig.form.names, factors, strict=True)
        ]
        exact = rig.expected(runs, x, routing)
        torch.testing.assert_close(y.double(), exact, rtol=TOLERANCE, atol=TOLERANCE)


def _as_ranks_keep(factors: Factors, form: Form, down: bool, ranks: int, dtype: torch.dtype) -> Factors:
    """Each rank rounds what it has: some experts, or of all experts the outputs, or the inputs of `down`."""
    cut_a, cut_b = (0, 0) if form.expert_parallel else (2, None) if down else (None, 2)
    a, b, scale = factors
    parts = b.unflatten(1, (2 if form.side_by_side and not down else 1, -1))  # each of which is cut
    return _rounded(a, cut_a, ranks, dtype), _rounded(parts, cut_b, ranks, dtype).flatten(1, 2), scale


def _rounded(factor: Tensor, cut: int | None, ranks: int, dtype: torch.dtype) -> Tensor:
    parts = [factor] if cut is None else factor.chunk(ranks, cut)
    kept = [quantize(part, dtype) for part in parts]
    return torch.cat([values.double() * scale for values, scale in kept], cut or 0)


def one_pair_for_gate_and_up(group: ParallelGroup, name: str) -> None:
    """An adapter with w13 enters slots that keep w1 and w3 apart."""
    rig = make_rig(group, name, 1)
    config = LoRAConfig(1, MAX_RANK, frozenset({"experts"}), fully_sharded_loras=rig.form.fully_sharded)
    slices = [part.slot_slice for part in rig.layer.served_parts(config)]
    arena = SlotArena(SlotLayout.on_rank(slices, config, group), 1, _device())
    rig.layer.create_lora_weights(1, config, arena=arena)
    a, b = torch.randn(EXPERTS, 3, HIDDEN), torch.randn(EXPERTS, 2 * INNER, 3)
    stored = {"layers.0.experts.w13": _module("layers.0.experts.w13", (a, b, 0.5))}
    arena.load(0, build_slot_image(stored, arena.layout))
    gate, up = b.chunk(2, dim=1)
    rig.adapters[0] = [(a, gate, 0.5), None, (a, up, 0.5)]
    compare(rig, [(0, 5), (-1, 2)])


EVERY_CHECK = (
    mixed_ranks, slots_lower_than_the_group, missing_modules, reused_slot, image_in_arena,
)  # fmt: skip


def layouts(group: ParallelGroup, name: str) -> tuple[str, int]:
    """(layout's hash, elements of a slot)."""
    rig = make_rig(group, name, 1)
    config = LoRAConfig(1, MAX_RANK, frozenset({"experts"}), fully_sharded_loras=rig.form.fully_sharded)
    layout = SlotLayout.on_rank([part.slot_slice for part in rig.layer.served], config, group)
    return layout.slot_layout, layout.slot_elements


def _as_stored(rig: Rig, factors: list[Factors | None]) -> dict[str, LoRAModule]:
    return {name: _module(name, f) for name, f in zip(rig.form.names, factors, strict=True) if f}


def _module(name: str, factors: Factors) -> LoRAModule:
    a, b, scale = factors
    b = b.transpose(1, 2).cpu()
    return LoRAModule(name, a.shape[1], scale, a.cpu().numpy(), np.ascontiguousarray(b.numpy()))
