"""vLLM's dense operations with FP8 weights against float64 on what the values and scales say, row by row.

Without a GPU the kernels run in Triton's interpreter; `-m gpu` has real sizes and captured graphs.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.launching.fp8 import quantized, spread
from kernels.vllm.dense import fp8_launches
from kernels.vllm.dense.fp8_launches import Fp8Config, expand_config, shrink_config
from kernels.vllm.dense.quantization import Quantization
from kernels.vllm.dense.step import Step
from kernels.vllm.lora_expand_fp8 import lora_expand_fp8
from kernels.vllm.lora_shrink_fp8 import lora_shrink_fp8
from tests.kernels.stack import DEVICE
from tests.kernels.vllm.dense_step import Layer, describe, expanded, shrunk, slots_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# The group of outputs and inputs that has a scale, and the reference's flags.
WAYS: dict[str, dict[str, object]] = {
    "tensor": {},
    "channel": {"per_channel_quant": True},
    "block": {"group_n": 12, "group_k": 32},
}
GROUPS = {"tensor": (0, 0), "channel": (1, 0), "block": (12, 32)}
LAYERS = {
    "one row": Layer(1, slots=(2,), rank=8),
    "five slices, one slot": Layer(12, (-1, 0), 1, 40, 70, outs=(4, 9, 4, 4, 17), beyond=3),
    "teams": Layer(21, rank=40, width=100, outs=(24, 8, 8), offset=5, beyond=3),
}
CONFIGS = {
    "teams": (Fp8Config(16, True, 64, 4, 1, split=2), Fp8Config(16, True, 16, 4, 1, columns=32)),
    "tiles": (Fp8Config(16, False, 32, 4, 1), Fp8Config(16, False, 16, 4, 1, columns=16)),
}


@dataclass(frozen=True)
class Operands:
    """A layer's FP8 arguments, and the numbers that they mean."""

    stack: list[Tensor]
    b_scale: list[Tensor]
    rows: Tensor
    a_scale: Tensor | None
    weights: list[Tensor]
    inputs: Tensor


def operands(weights: list[Tensor], x: Tensor, way: str, fp8: torch.dtype, rows: str) -> Operands:
    """rows: which scales rows have, and "floating": they are no FP8."""
    group = GROUPS[way]
    both = [quantized(weight, fp8, group) for weight in weights]
    whole = [values.float() * spread(scale, values.shape[-2:], group) for values, scale in both]
    b_scale = [scale[:, 0] if way == "block" else scale.flatten(1).squeeze(1) for _, scale in both]
    # As vLLM's test makes them where there is one slot.
    b_scale = [scale.squeeze(0) if len(scale) == 1 and way == "channel" else scale for scale in b_scale]
    stack = [values for values, _ in both]
    if rows == "floating":
        return Operands(stack, b_scale, x, None, whole, x)
    groups = -(-x.shape[-1] // 32) if way == "block" and rows == "blocks" else 1
    shape = {"one": (1,), "none": (1,)}.get(rows, (x.shape[-2], groups))
    a_scale = torch.ones(shape) if rows == "none" else torch.rand(shape) + 0.5
    values = x.to(fp8)
    scales = a_scale.view(1, 1) if a_scale.dim() == 1 else a_scale
    inputs = values.float() * spread(scales, (len(scales), x.shape[-1]), (1, 32 if groups > 1 else 0))
    return Operands(stack, b_scale, values, None if rows == "none" else a_scale, whole, inputs)


ROWS = ("floating", "none", "one", "each", "blocks")
CASES = [
    *((name, "torch", way, rows) for name in LAYERS for way in WAYS for rows in ROWS),
    ("one row", "teams", "block", "each"),
    ("one row", "tiles", "tensor", "none"),
    ("five slices, one slot", "tiles", "channel", "each"),
    ("five slices, one slot", "tiles", "block", "none"),
    ("teams", "teams", "tensor", "one"),
    ("teams", "teams", "channel", "floating"),
    ("teams", "teams", "block", "blocks"),
    ("teams", "tiles", "tensor", "floating"),
    ("teams", "tiles", "channel", "each"),
    ("teams", "tiles", "block", "floating"),
]


@pytest.mark.parametrize(("name", "form", "way", "rows"), CASES)
def test_each_row_has_its_own_adapters_answer(name: str, form: str, way: str, rows: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]
    (a, b), (x, y), step = layer.weights(), layer.inputs(), layer.step()
    fp8 = E5M2 if rows == "each" else E4M3
    of_a = operands(a, x, way, fp8, rows)
    of_b = operands(b, torch.randn(len(b), len(x), layer.rank), way, fp8, rows)
    add_inputs, wanted = rows != "one", shrunk(layer, of_a.inputs, of_a.weights, 0.5)
    h, after = torch.full(wanted.shape, torch.nan), y.clone()
    if form == "torch":
        options, seven = {**WAYS[way], "use_fp8_w8a8": True}, step_arguments(step)
        lora_shrink_fp8(of_a.rows, of_a.stack, h, *seven, 0.5, of_a.b_scale, of_a.a_scale, **options)
        rest = of_b.b_scale, of_b.a_scale, layer.offset, add_inputs
        lora_expand_fp8(of_b.rows, of_b.stack, after, *seven, *rest, **options)
    else:
        in_kernels(layer, CONFIGS[form], way, of_a, of_b, h, after, add_inputs)
    torch.testing.assert_close(h.double(), wanted, atol=1e-5, rtol=1e-5)
    wanted = expanded(layer, y, of_b.inputs, of_b.weights, add_inputs)
    torch.testing.assert_close(after.double(), wanted, atol=2e-5, rtol=1e-5)


def step_arguments(step: Step) -> tuple[object, ...]:
    return tuple(getattr(step, name) for name in Step.__slots__)


def in_kernels(
    layer: Layer, configs: tuple[Fp8Config, Fp8Config], way: str, of_a: Operands, of_b: Operands, h: Tensor,
    y: Tensor, add_inputs: bool,
) -> None:  # fmt: skip
    """Shrink into h and expand into y as the operators do on a GPU, with block sizes for small layers."""
    step, moved = replace(layer, device=DEVICE).step(), []
    group_n, group_k = WAYS[way].get("group_n", 0), WAYS[way].get("group_k", 0)
    for of in (of_a, of_b):
        stack, scales = ([each.to(DEVICE) for each in part] for part in (of.stack, of.b_scale))
        rows, factors = of.rows.to(DEVICE), None if of.a_scale is None else of.a_scale.to(DEVICE)
        quantization = Quantization(group_k, group_n, way == "channel")
        moved.append((rows, stack, quantization.scaling(stack, "stack", scales, rows, factors)))
    h_there, y_there = h.to(DEVICE), y.to(DEVICE)
    (x, a, of), (hidden, b, of_hidden) = moved
    fp8_launches.shrink(h_there, x, a, step, 0.5, of, configs[0])
    fp8_launches.expand(y_there, hidden, b, step, layer.offset, of_hidden, configs[1], add_inputs=add_inputs)
    h.copy_(h_there)
    y.copy_(y_there)


def test_operators_run_in_a_traced_graph_and_without_quantization() -> None:
    layer = replace(LAYERS["teams"], dtype=torch.float32)
    (a, b), (x, y), seven = layer.weights(), layer.inputs(), step_arguments(layer.step())
    seven = (*seven[:-1], int(seven[-1]))
    both = [[quantized(weight, E4M3, (0, 0)) for weight in stack] for stack in (a, b)]

    def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h, plain, scaled = torch.empty(3, len(x), layer.rank), y.clone(), y.clone()
        lora_shrink_fp8(x, a, h, *seven, 0.5, [])
        lora_expand_fp8(h, b, plain, *seven, [], offset_start=layer.offset, add_inputs=True)
        values, scales = ([[each[i] for each in stack] for stack in both] for i in (0, 1))
        lora_shrink_fp8(x, values[0], h, *seven, 0.5, scales[0], use_fp8_w8a8=True)
        lora_expand_fp8(h, values[1], scaled, *seven, scales[1], None, layer.offset, True, use_fp8_w8a8=True)
        return plain, scaled

    plain, scaled = run(x, y)
    wanted = expanded(layer, y, shrunk(layer, x, a, 0.5), b, True)
    torch.testing.assert_close(plain.double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scaled.double(), wanted, atol=0.2, rtol=0.1)
    torch._dynamo.reset()
    traced = torch.compile(run, backend="aot_eager", fullgraph=True)(x, y)
    assert torch.equal(traced[0], plain) and torch.equal(traced[1], scaled)


SHRINK_REFUSED = {
    "inputs": {"inputs": torch.ones(6, 40, dtype=torch.int8)},
    "inputs of another width": {"inputs": torch.ones(6, 39).to(E4M3)},
    "lora_a_weights[0]": {"lora_a_weights": [torch.ones(4, 6, 40)] * 2},
    "lora_a_weights[1]": {"lora_a_weights": [torch.ones(4, 6, 40).to(t) for t in (E4M3, E5M2)]},
    "output_tensor": {"output_tensor": torch.ones(2, 6, 6).to(E4M3)},
    "b_scale": {"b_scale": []},
    "b_scale[0]": {"b_scale": [torch.ones(4, 6)] * 2},
    "b_scale[1]": {"b_scale": [torch.ones(4), torch.ones(4).half()]},
    "b_scale[0] strided": {"b_scale": [torch.ones(8)[::2]] * 2},
    "b_scale[0] by channel": {"per_channel_quant": True},
    "b_scale[0] by block": {"group_n": 2, "group_k": 32},
    "group_k": {"group_n": 8, "group_k": 24, "b_scale": [torch.ones(4, 1, 2)] * 2},
    "a_scale": {"a_scale": torch.ones(5, 1)},
    "a_scale of one dimension": {"a_scale": torch.ones(6)},
    "b_scale without FP8": {
        "use_fp8_w8a8": False, "lora_a_weights": [torch.ones(4, 6, 40)] * 2, "inputs": torch.ones(6, 40)
    },
    "a_scale without FP8": {"use_fp8_w8a8": False, "b_scale": [], "a_scale": torch.ones(1)},
    "lora_ids": {"lora_ids": torch.ones(5, dtype=torch.int64)},
}  # fmt: skip


@pytest.mark.parametrize("what", SHRINK_REFUSED)
def test_what_does_not_fit_is_named(what: str) -> None:
    step = Layer(6).step()
    given = {name: getattr(step, name) for name in Step.__slots__} | {
        "inputs": torch.ones(6, 40).to(E4M3), "lora_a_weights": [torch.ones(4, 6, 40).to(E4M3)] * 2,
        "output_tensor": torch.full((2, 6, 6), 7.0), "b_scale": [torch.ones(4)] * 2, "scaling": 1.0,
        "use_fp8_w8a8": True, **SHRINK_REFUSED[what],
    }  # fmt: skip
    with pytest.raises(KernelArgumentError) as refused:
        lora_shrink_fp8(**given)
    assert refused.value.argument == what.split()[0]
    assert given["output_tensor"].dtype == E4M3 or (given["output_tensor"] == 7.0).all()


EXPAND_REFUSED = {
    "inputs": {"inputs": torch.ones(1, 6, 5).to(E4M3)},
    "lora_b_weights[0]": {"lora_b_weights": [torch.ones(4, 9, 6).half()]},
    "output_tensor": {"offset_start": 4},
    "b_scale[0]": {"b_scale": [torch.ones(4, 6)], "per_channel_quant": True},
    "a_scale": {"a_scale": torch.ones(6, 2)},
}


@pytest.mark.parametrize("what", EXPAND_REFUSED)
def test_expands_arguments_that_do_not_fit_are_named(what: str) -> None:
    step = Layer(6).step()
    given = {name: getattr(step, name) for name in Step.__slots__} | {
        "inputs": torch.ones(1, 6, 6).to(E4M3), "lora_b_weights": [torch.ones(4, 9, 6).to(E4M3)],
        "output_tensor": torch.full((6, 12), 7.0), "b_scale": [torch.ones(4)], "use_fp8_w8a8": True,
        **EXPAND_REFUSED[what],
    }  # fmt: skip
    with pytest.raises(KernelArgumentError) as refused:
        lora_expand_fp8(**given)
    assert refused.value.argument == what.split()[0]
    assert (given["output_tensor"] == 7.0).all()


def test_nothing_is_written_where_no_row_has_an_adapter() -> None:
    layer = Layer(6, slots=(-1,))
    seven, h, y = step_arguments(layer.step()), torch.full((1, 6, 6), 7.0), torch.full((6, 21), 7.0)
    a, b, ones = torch.ones(4, 6, 40).to(E4M3), torch.ones(4, 21, 6).to(E4M3), [torch.ones(4)]
    lora_shrink_fp8(torch.ones(6, 40).to(E4M3), [a], h, *seven, 1.0, ones, use_fp8_w8a8=True)
    lora_expand_fp8(h, [b], y, *seven, ones, use_fp8_w8a8=True)
    assert (h == 7.0).all() and (y == 7.0).all()


# Products of FP8 are exact; the rest is rounding of y, and of what stands between to y's type.
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 2e-6}
REAL = {"max_loras": 64, "width": 4096, "outs": (1024, 512, 512), "device": "cuda"}
REAL_GROUPS = {"tensor": (0, 0), "channel": (1, 0), "block": (128, 128)}


@pytest.mark.parametrize("rows_fp8", [True, False], ids=["FP8 x FP8", "weights alone"])
@pytest.mark.parametrize("rank", [8, 64, 160])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [1, 64, 512, 5000])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_real_sizes_and_captured_graphs(
    rows: int, way: str, dtype: torch.dtype, rank: int, rows_fp8: bool
) -> None:
    """One graph is replayed over steps of other adapters and fewer rows: the buffers say what there is."""
    fewer = max(rows - 3, 1)
    layers = [
        Layer(count, slots_of(count, first, n), rank=rank, beyond=rows - count, seed=n, dtype=dtype, **REAL)
        for count, first, n in ((rows, 0, 8), (fewer, 9, 50), (rows, 20, 1))
    ]
    step, weights, (x, y) = layers[0].step(), layers[0].weights(), layers[0].inputs()
    group = REAL_GROUPS[way]
    flags = {"use_fp8_w8a8": True, "per_channel_quant": way == "channel"}
    if way == "block":
        flags |= {"group_n": 128, "group_k": min(128, rank)}
    both = [
        [quantized(w[:, 0], E4M3, (group[0], min(group[1], w.shape[-1]))) for w in stack] for stack in weights
    ]
    a, b = ([values for values, _ in stack] for stack in both)
    scales = [[scale if way == "block" else scale.squeeze(-1).squeeze(-1) for _, scale in s] for s in both]
    wide = [
        [v.double() * spread(s, v.shape[-2:], (group[0], min(group[1], v.shape[-1]))) for v, s in stack]
        for stack in both
    ]
    by = (1, 128 if way == "block" else 0)
    x_given, x_scale = quantized(x, E4M3, by) if rows_fp8 else (x, None)
    x_wide = x.double() if x_scale is None else x_given.double() * spread(x_scale, x.shape, by)
    h, out, seven = torch.empty(3, rows, rank, device="cuda"), y.clone(), step_arguments(step)

    def run() -> None:
        out.copy_(y)
        shrink_flags = {**flags, "group_k": 128} if way == "block" else flags
        lora_shrink_fp8(x_given, a, h, *seven, 0.5, scales[0], x_scale, **shrink_flags)
        lora_expand_fp8(h, b, out, *seven, scales[1], None, 0, True, **flags)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for layer in layers:
        described = describe(layer.mapping(), 64, rows).to("cuda")
        for name in Step.__slots__[:5]:
            getattr(step, name).copy_(getattr(described, name))
        graph.replay()
        wanted, mapping = y.double(), layer.mapping().cuda()
        h_wanted = torch.zeros_like(h, dtype=torch.float64)
        for slot in set(mapping.tolist()) - {-1}:
            mine, start = (mapping == slot).nonzero().view(-1), 0
            for s in range(3):
                h_wanted[s, mine] = x_wide[mine] @ wide[0][s][slot].T * 0.5
                columns = slice(start, start := start + b[s].shape[-2])
                wanted[mine, columns] += h_wanted[s, mine] @ wide[1][s][slot].T
        for got, truth in ((h[:, : layer.rows], h_wanted[:, : layer.rows]), (out, wanted)):
            assert (got.double() - truth).norm() <= TOLERANCE[dtype] * truth.norm(), layer.rows
        again = out.clone()
        graph.replay()
        assert torch.equal(out, again)


def test_the_choice_of_block_sizes_depends_on_sizes_alone() -> None:
    """So that what is captured for a size is right for each of its steps."""
    for rows in (1, 8, 64, 256, 1024, 1025, 8192):
        shrink, expand = shrink_config(rows, 4096, 1), expand_config(rows)
        assert shrink.teams == expand.teams == (rows <= 1024)
        assert expand.columns % expand.block == 0
