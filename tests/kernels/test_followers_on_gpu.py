"""The fused followers at real shapes, in captured graphs, on two streams. Run with `pytest -m gpu`."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.launching.follower import PagedCache
from kernels.launching.side_stream import SideStream
from kernels.lora_expand_add_rms_norm import lora_expand_add_rms_norm
from kernels.lora_expand_rope import lora_expand_rope
from kernels.lora_expand_silu_mul import lora_expand_silu_mul
from kernels.lora_shrink import lora_shrink
from kernels.metadata.launch_plan import LaunchPlan
from kernels.metadata.meta import LoRAKernelMeta
from kernels.metadata.work_list import Run
from tests.kernels.stack import Stack, make_stack, row_slots

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RANKS = [16, 64, 1, 0, 8, 33, 64, 5, 16, 128, 2, 100, 16, 16, 64, 8]
STEPS: dict[str, list[Run]] = {
    "1 of 1": [(3, 1)],
    "64 of 64": [(slot, 1) for slot in range(16)] * 4,
    "64 of 1": [(5, 64)],
    "mixed": [(0, 200), (-1, 5), (7, 1), (9, 40), (-1, 1), (7, 30)],
    "prefill": [(slot, 301) for slot in range(8)] + [(-1, 77)],
    "base": [(-1, 33)],
}
WIDTHS = {
    "silu_mul": (4096, [14336, 14336]),
    "add_rms_norm": (14336, [4096]),
    "rope": (4096, [4096, 1024, 1024]),
}
HEAD, EPS = 128, 1e-5
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


class Layer:
    """A layer's weights, the rest that its follower takes, and the float64 answer."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        width, widths = WIDTHS[kind]
        ranks = [RANKS[turn:] + RANKS[:turn] for turn in range(len(widths))]
        self.kind, self.width, self.columns, self.dtype = kind, width, sum(widths), dtype
        self.stack: Stack = make_stack(ranks, width, widths, max_rank=128, dtype=dtype).to("cuda")
        self.weight = (torch.rand(self.columns, device="cuda") + 0.5).to(dtype)

    def tensors(self, rows: int) -> dict[str, Tensor]:
        """x and all that a follower reads and writes; outputs are NaN."""
        angles = torch.rand(rows, HEAD // 2, device="cuda") * 6
        half = self.columns // 2 if self.kind == "silu_mul" else self.columns
        cache = torch.full((2, rows // 16 + 2, 16, 8, HEAD), torch.nan, device="cuda", dtype=self.dtype)
        return {
            "x": torch.randn(rows, self.width, device="cuda").to(self.dtype),
            "y": torch.randn(rows, self.columns, device="cuda").to(self.dtype),
            "residual": torch.randn(rows, self.columns, device="cuda").to(self.dtype),
            "out": torch.full((rows, half), torch.nan, device="cuda", dtype=self.dtype),
            "cos": angles.cos(),
            "sin": angles.sin(),
            "cache": cache,
            "kv_slots": torch.randperm(cache.shape[1] * 16, device="cuda")[:rows],
        }

    def follow(self, given: dict[str, Tensor], h: Tensor, meta: LoRAKernelMeta) -> None:
        lora_b, ranks, y, out = self.stack.lora_b, self.stack.ranks, given["y"], given["out"]
        if self.kind == "silu_mul":
            lora_expand_silu_mul(out, y, h, lora_b, ranks, meta)
        elif self.kind == "rope":
            cache = PagedCache(given["cache"], given["kv_slots"])
            lora_expand_rope(y, h, lora_b, ranks, given["cos"], given["sin"], meta, cache)
        else:
            residual = given["residual"]
            lora_expand_add_rms_norm(out, residual, y, h, lora_b[0], ranks, self.weight, EPS, meta)

    def shrink(self, given: dict[str, Tensor], h: Tensor, meta: LoRAKernelMeta) -> None:
        lora_shrink(h, given["x"], self.stack.lora_a, self.stack.ranks, self.stack.scales, meta)

    def result(self, given: dict[str, Tensor]) -> Tensor:
        if self.kind == "silu_mul":
            return given["out"]
        if self.kind == "add_rms_norm":
            return torch.cat((given["out"], given["residual"]), dim=1)
        planes = given["cache"].flatten(3).flatten(1, 2)[:, given["kv_slots"]]
        return torch.cat((given["y"][:, :4096], *planes), dim=1)

    def answer(self, given: dict[str, Tensor], runs: list[Run]) -> Tensor:
        """float64, from the tensors as they were before the step."""
        z = given["y"].double() + self._delta(given["x"].double(), runs)
        if self.kind == "silu_mul":
            gate, up = z.chunk(2, dim=1)
            return F.silu(gate) * up
        if self.kind == "add_rms_norm":
            z = z + given["residual"].double()
            return torch.cat((F.rms_norm(z, z.shape[1:], self.weight.double(), EPS), z), dim=1)
        turn = torch.complex(given["cos"].double(), given["sin"].double())[:, None]
        q, k, v = z.split([4096, 1024, 1024], dim=1)
        turned = []
        for part in (q, k):
            first, second = part.unflatten(1, (-1, HEAD)).chunk(2, dim=2)
            both = torch.complex(first.contiguous(), second.contiguous()) * turn
            turned.append(torch.cat((both.real, both.imag), dim=2).flatten(1))
        return torch.cat((*turned, v), dim=1)

    def _delta(self, x: Tensor, runs: list[Run]) -> Tensor:
        stack, parts = self.stack, []
        slots = torch.tensor(row_slots(runs), device="cuda")
        for s, (lora_a, lora_b) in enumerate(zip(stack.lora_a, stack.lora_b, strict=True)):
            part = torch.zeros(len(x), lora_b.shape[2], device="cuda", dtype=torch.float64)
            for slot in sorted(set(row_slots(runs)) - {-1}):
                rows, rank = (slots == slot).nonzero()[:, 0], int(stack.ranks[s, slot])
                a, b = lora_a[slot, :rank].double(), lora_b[slot, :rank].double()
                part[rows] = (x[rows] @ a.T * stack.scales[s, slot].double()) @ b
            parts.append(part)
        return torch.cat(parts, dim=1)


def make_meta(layer: Layer, runs: list[Run], plan: LaunchPlan | None = None) -> LoRAKernelMeta:
    meta = LoRAKernelMeta.make(16, max(4096, sum(rows for _, rows in runs)), "cuda")
    meta.slot_ranks[:] = layer.stack.ranks.amax(0).tolist()
    meta.prepare_tensors(runs, plan)
    return meta


def hidden(layer: Layer, rows: int) -> Tensor:
    return torch.full((len(layer.stack.lora_a), rows, 128), torch.nan, device="cuda")


def error(got: Tensor, wanted: Tensor) -> float:
    return ((got.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", WIDTHS)
def test_real_shapes_against_float64(kind: str, dtype: torch.dtype) -> None:
    layer = Layer(kind, dtype)
    for name, runs in STEPS.items():
        rows, meta = len(row_slots(runs)), make_meta(layer, runs)
        given, results = layer.tensors(rows), []
        wanted = layer.answer(given, runs)
        for _ in range(2):
            copies = {key: value.clone() for key, value in given.items()}
            h = hidden(layer, rows)
            layer.shrink(copies, h, meta)
            layer.follow(copies, h, meta)
            results.append(layer.result(copies))
        assert error(results[0], wanted) < TOLERANCE[dtype], name
        assert torch.equal(results[0], results[1]), name


@pytest.mark.parametrize("kind", WIDTHS)
def test_the_last_rows_of_a_step_whose_offsets_exceed_32_bits(kind: str) -> None:
    """Rows x columns in elements, and places in the KV cache."""
    layer, last = Layer(kind, torch.bfloat16), 64
    rows = 2**31 // layer.columns + last
    small = layer.tensors(last)
    wanted = layer.answer(small, [(9, last)])
    given = {name: grown(tensor, rows) for name, tensor in small.items() if len(tensor) == last}
    given["cache"] = small["cache"].new_empty(2, 2**31 // (16 * 8 * HEAD) + 2, 16, 8, HEAD)
    places = given["cache"].shape[1] * 16
    given["kv_slots"] = torch.arange(places - rows, places, device="cuda")
    meta, h = make_meta(layer, [(-1, rows - last), (9, last)]), hidden(layer, rows)
    layer.shrink(given, h, meta)
    layer.follow(given, h, meta)
    ends = {name: tensor if name == "cache" else tensor[-last:] for name, tensor in given.items()}
    assert error(layer.result(ends), wanted) < TOLERANCE[torch.bfloat16]


def grown(tensor: Tensor, rows: int) -> Tensor:
    """With that many rows, of which the last ones are the tensor's."""
    more = tensor.new_empty(rows, *tensor.shape[1:])
    more[-len(tensor) :] = tensor
    return more


def capture(call: Callable[[], None]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@pytest.mark.parametrize("beside", [False, True], ids=["one stream", "two streams"])
@pytest.mark.parametrize("rows_per_item", [1, 16])
@pytest.mark.parametrize("kind", WIDTHS)
def test_a_captured_layer_replays_other_steps(kind: str, rows_per_item: int, beside: bool) -> None:
    """Base product, shrink (beside it or after it) and follower, replayed with other adapters, or none."""
    layer, rows = Layer(kind, torch.bfloat16), 16
    plan = LaunchPlan.for_graph(rows, 16, rows_per_item=rows_per_item)
    meta, given, h = make_meta(layer, [(2, 16)], plan), layer.tensors(rows), hidden(layer, rows)
    base = torch.randn(layer.columns, layer.width, device="cuda").to(torch.bfloat16) / layer.width**0.5
    side = SideStream("cuda")

    def step() -> None:
        h.fill_(torch.nan)
        product = partial(torch.mm, given["x"], base.T, out=given["y"])
        shrink = partial(layer.shrink, given, h, meta)
        if beside:
            side.run_beside(product, shrink)
        else:
            product()
            shrink()
        layer.follow(given, h, meta)

    graph = capture(step)
    steps = [[(slot, 1) for slot in range(16)], [(9, 3), (-1, 2), (1, 11)], [(-1, 16)], [(2, 16)]] * 5
    for runs in steps:
        for name, tensor in layer.tensors(rows).items():
            given[name].copy_(tensor)
        before = {name: tensor.clone() for name, tensor in given.items()}
        before["y"] = given["x"] @ base.T
        meta.prepare_tensors(runs, plan)
        graph.replay()
        assert error(layer.result(given), layer.answer(before, runs)) < TOLERANCE[torch.bfloat16]
