"""vLLM's dense operations against float64, row by row: as operators, and as kernels where Triton runs.

Without a GPU the kernels run in Triton's interpreter; `-m gpu` has real sizes and captured graphs.
"""

import random
from dataclasses import replace

import pytest
import torch

from kernels.errors import KernelArgumentError
from kernels.vllm.dense import launches, layer_forms, reference
from kernels.vllm.dense.step import Step
from kernels.vllm.dense.tuning import expand_config, product_config, shrink_config
from kernels.vllm.dense.work import MOST_SINGLE_ROWS
from kernels.vllm.lora_expand import lora_expand
from kernels.vllm.lora_linear import add_lora_linear, linear_with_lora
from kernels.vllm.lora_shrink import lora_shrink
from tests.kernels.vllm.dense_step import Layer, describe, expanded, shrunk, slots_of

LAYERS = {
    "one row": Layer(1, slots=(2,)),
    "no adapter but one": Layer(7, slots=(-1, -1, -1, 1)),
    "few rows": Layer(8, beyond=5),
    "alone": Layer(20, slots=(-1, *range(20)), max_loras=20, rank=8),
    "teams": Layer(40, beyond=8, rank=16, outs=(24, 8, 8), offset=5),
    "a long team": Layer(70, slots=(1,), rank=5, outs=(9, 9)),
    "high rank": Layer(19, slots=(-1, 0, 3), rank=70, outs=(12,)),
    "five slices": Layer(12, outs=(4, 9, 4, 4, 7)),
    "rank 2": Layer(30, rank=2),
    "tiles of 16": Layer(300, slots=(-1, *range(9)), max_loras=12, outs=(20, 10), beyond=11),
    "tiles of 64": Layer(1030, slots=(-1, 0, 3), width=24, outs=(10, 5, 5)),
}
IDLE = Layer(6, slots=(-1,))
FORMS = {"torch": reference, "triton": launches}


def random_layer(seed: int) -> Layer:
    draw = random.Random(seed)
    max_loras = draw.randint(1, 9)
    slots = draw.sample(range(-1, max_loras), draw.randint(1, min(5, max_loras + 1)))
    outs = tuple(draw.randint(1, 40) for _ in range(draw.randint(1, 4)))
    return Layer(
        draw.choice((1, 3, 9, 17, 33, 50)), [*slots, 0], max_loras, draw.randint(1, 40), draw.randint(1, 80),
        outs, draw.randint(0, 3), draw.randint(0, 20), seed,
    )  # fmt: skip


ALL = {**LAYERS, **{f"random {seed}": random_layer(seed) for seed in range(12)}}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("layer", ALL.values(), ids=ALL)
def test_each_row_has_its_own_adapters_answer(layer: Layer, form) -> None:
    step, (a, b), (x, y) = layer.step(), layer.weights(), layer.inputs()
    wanted = shrunk(layer, x, a, 0.5)
    h = torch.full(wanted.shape, torch.nan)
    form.shrink(h, x, a, step, 0.5)
    torch.testing.assert_close(h.double(), wanted, atol=1e-5, rtol=1e-5)
    for add_inputs in (True, False):
        out = y.clone()
        form.expand(out, h, b, step, layer.offset, add_inputs=add_inputs)
        torch.testing.assert_close(out.double(), expanded(layer, y, h, b, add_inputs), atol=1e-5, rtol=1e-5)
    out = y[:, layer.offset :].clone()
    form.add_pair(out, x, a, b, step, 0.5, add_inputs=True)
    wanted = expanded(replace(layer, offset=0), y[:, layer.offset :], wanted, b, True)
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
    if form is launches:
        told = y[:, layer.offset :].clone()
        form.add_pair(told, x, a, b, step, 0.5, add_inputs=True, work=layer.work())
        torch.testing.assert_close(told, out, atol=1e-5, rtol=1e-5)


def mapping_of(layer: Layer) -> torch.Tensor:
    """Each row's slot, as our wrapper writes it: -1 behind the step's rows."""
    return torch.cat([layer.mapping(), torch.full((layer.beyond,), -1)]).int()


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("rows", [5, 24, 60])
@pytest.mark.parametrize("split", [1, 2])
def test_a_product_between_shrink_and_expand(rows: int, split: int, told: bool) -> None:
    layer = Layer(rows, slots=(-1, 3, 0, 2, 2, 2, 1), rank=5, width=512, outs=(64, 128), beyond=3)
    (a, b), (x, _) = layer.weights(), layer.inputs()
    step = replace(layer.step(), token_lora_mapping=mapping_of(layer))
    weight = torch.randn(sum(layer.outs), x.shape[1])
    config = product_config(len(x), *weight.shape)
    assert config is not None
    y = torch.full((len(x), len(weight)), torch.nan)
    work = layer.work() if told else None
    launches.product_with_pair(y, x, weight, a, b, step, work, replace(config, split=split))
    wanted = expanded(layer, x @ weight.T, shrunk(layer, x, a, 1.0), b, True)
    torch.testing.assert_close(y.double(), wanted, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", ["tiles of 16", "tiles of 64", "teams"])
def test_a_product_before_or_behind_its_lora(name: str) -> None:
    """LoRA first writes each row: those without an adapter, and those behind the step's, too."""
    layer = replace(LAYERS[name], offset=0)
    step, (a, b), (x, _) = layer.step(), layer.weights(), layer.inputs()
    weight = torch.randn(sum(layer.outs), x.shape[1])
    wanted = expanded(layer, x @ weight.T, shrunk(layer, x, a, 1.0), b, True)
    forms: list[layer_forms.Form] = ["behind"] if len(x) <= MOST_SINGLE_ROWS else ["before", "behind"]
    for form in forms:
        y = torch.full((len(x), len(weight)), torch.nan)
        layer_forms.product_with_lora(y, x, weight, None, a, b, step, layer.work(), form)
        torch.testing.assert_close(y.double(), wanted, atol=1e-5, rtol=1e-5)


def test_a_delta_is_added_where_it_was_written() -> None:
    layer = replace(LAYERS["teams"], offset=0)
    step, (a, b), (x, _) = layer.step(), layer.weights(), layer.inputs()
    step = replace(step, token_lora_mapping=mapping_of(layer))
    y = torch.randn(len(x), sum(layer.outs))
    delta = torch.full_like(y, torch.nan)
    launches.add_pair(delta, x, a, b, step, 1.0, add_inputs=False, work=layer.work())
    launches.add_delta(got := y.clone(), delta, step, layer.max_loras)
    wanted = expanded(layer, y, shrunk(layer, x, a, 1.0), b, True)
    torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(got[layer.rows :], y[layer.rows :])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_head_that_few_adapters_have(form) -> None:
    layer = Layer(24, slots=(-1, 0, 1, 2, 3), rank=5, width=8, outs=(32_100,))
    step, (a, b), (x, y) = layer.step(), layer.weights(), layer.inputs()
    a[0][1:] = 0.0
    h = torch.empty(1, len(x), layer.rank)
    form.shrink(h, x, a, step, 1.0)
    form.expand(y_got := y.clone(), h, b, step, 0, add_inputs=True)
    wanted = expanded(layer, y, shrunk(layer, x, a, 1.0), b, True)
    torch.testing.assert_close(y_got.double(), wanted, atol=1e-5, rtol=1e-5)
    with_head = torch.tensor([slot == 0 for slot in layer.mapping().tolist()])
    assert torch.equal(y_got[~with_head], y[~with_head])


def test_operators_run_as_functions_and_in_a_traced_graph() -> None:
    layer = replace(LAYERS["teams"], offset=0)
    step, (a, b), (x, y) = layer.step(), layer.weights(), layer.inputs()
    seven = tuple(getattr(step, name) for name in Step.__slots__)

    def run(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.empty(len(a), len(x), layer.rank)
        lora_shrink(x, a, h, *seven, 0.5)
        apart, together = y.clone(), y.clone()
        lora_expand(h, b, apart, *seven, offset_start=0, add_inputs=True)
        add_lora_linear(together, x, a, b, *seven, 0.5, True)
        return apart, together, linear_with_lora(x, weight, bias, a, b, *seven, None)

    weight, bias = torch.randn(sum(layer.outs), x.shape[1]), torch.randn(sum(layer.outs))
    apart, together, whole = run(x, y)
    assert torch.equal(apart, together)
    product = torch.nn.functional.linear(x, weight, bias)
    product_wanted = expanded(layer, product, shrunk(layer, x, a, 1.0), b, True)
    torch.testing.assert_close(whole.double(), product_wanted, atol=1e-5, rtol=1e-5)
    torch._dynamo.reset()
    traced = torch.compile(run, backend="aot_eager", fullgraph=True)(x, y)
    assert all(torch.equal(*pair) for pair in zip(traced, (apart, together, whole), strict=True))
    wanted = expanded(layer, y, shrunk(layer, x, a, 0.5), b, True)
    torch.testing.assert_close(together.double(), wanted, atol=1e-5, rtol=1e-5)


def test_nothing_is_written_where_no_row_has_an_adapter() -> None:
    step, (a, b), (x, y) = IDLE.step(), IDLE.weights(), IDLE.inputs()
    seven, before = tuple(getattr(step, name) for name in Step.__slots__), y.clone()
    h = torch.full((1, len(x), IDLE.rank), 7.0)
    lora_shrink(x, a, h, *seven, 1.0)
    lora_expand(h, b, y, *seven)
    add_lora_linear(y, x, a, b, *seven, 1.0)
    assert torch.equal(y, before) and (h == 7.0).all()


REFUSED = {
    "inputs": lambda x, a, h: (x.to(torch.float64), a, h),
    "inputs ": lambda x, a, h: (x.T.contiguous().T, a, h),
    "inputs  ": lambda x, a, h: (x[:, :-1].contiguous(), a, h),
    "lora_a_weights": lambda x, a, h: (x, [], h),
    "lora_a_weights[0]": lambda x, a, h: (x, [a[0][0, 0]], h),
    "lora_a_weights[1]": lambda x, a, h: (x, [a[0], a[0][:, :, :-1]], h),
    "lora_a_weights[0] ": lambda x, a, h: (x, [a[0].to(torch.int16)], h),
    "output_tensor": lambda x, a, h: (x, a, h[:, :-1]),
    "output_tensor ": lambda x, a, h: (x, a, h.to(torch.int32)),
    "token_lora_mapping": lambda x, a, h: (x[:-1], a, h[:, :-1].contiguous()),
}


@pytest.mark.parametrize("argument", REFUSED)
def test_arguments_that_do_not_fit_are_refused_by_name(argument: str) -> None:
    layer = LAYERS["few rows"]
    step, (a, _), (x, _) = layer.step(), layer.weights(), layer.inputs()
    seven = tuple(getattr(step, name) for name in Step.__slots__)
    x, a, h = REFUSED[argument](x, a, torch.zeros(1, len(x), layer.rank))
    with pytest.raises(KernelArgumentError) as refused:
        lora_shrink(x, a, h, *seven, 1.0)
    assert refused.value.argument == argument.strip()


def test_expands_arguments_that_do_not_fit_are_refused_by_name() -> None:
    layer = LAYERS["few rows"]
    step, (a, b), (x, y) = layer.step(), layer.weights(), layer.inputs()
    seven = tuple(getattr(step, name) for name in Step.__slots__)
    h = torch.zeros(1, len(x), layer.rank)
    for argument, inputs, weights, output, offset in (
        ("output_tensor", h, b, y, 4),
        ("output_tensor", h, b, y.T.contiguous().T, 0),
        ("inputs", h[0], b, y, 0),
        ("lora_b_weights[1]", h.expand(2, -1, -1).contiguous(), [b[0], b[0][..., :-1].contiguous()], y, 0),
    ):
        with pytest.raises(KernelArgumentError) as refused:
            lora_expand(inputs, weights, output, *seven, offset_start=offset)
        assert refused.value.argument == argument
    with pytest.raises(KernelArgumentError) as refused:
        add_lora_linear(y, x, a, [weight[:-1] for weight in b], *seven, 1.0)
    assert refused.value.argument == "lora_b_stacked"


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
REAL = {"max_loras": 64, "width": 4096, "rank": 16, "device": "cuda"}
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 2e-6}


@pytest.mark.parametrize("rank", [8, 16, 64])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [1, 8, 33, 64, 128, 256, 512, 2048, 5000])
@pytest.mark.parametrize("adapters", [1, 8, 64])
@pytest.mark.gpu
@GPU[1]
def test_real_sizes_and_captured_graphs(rows: int, adapters: int, dtype: torch.dtype, rank: int) -> None:
    """One graph is replayed over steps of other adapters and fewer rows: the buffers say what there is."""
    shape = {**REAL, "rank": rank, "dtype": dtype, "outs": (1024, 512, 512)}
    fewer = max(rows - 3, 1)
    layers = [
        Layer(count, slots_of(count, first, n), beyond=rows - count, seed=n, **shape)
        for count, first, n in ((rows, 0, adapters), (fewer, 9, max(1, adapters // 2)), (rows, 20, 1))
    ]
    first = layers[0]
    step, (a, b), (x, y) = first.step(), first.weights(), first.inputs()
    out, h, work = y.clone(), torch.empty(3, rows, rank, device="cuda"), first.work()
    told = y.clone()

    def run() -> None:
        out.copy_(y)
        told.copy_(y)
        launches.shrink(h, x, a, step, 0.5)
        launches.add_pair(out, x, a, b, step, 0.5, add_inputs=True)
        launches.add_pair(told, x, a, b, step, 0.5, add_inputs=True, work=work)
        whole.copy_(linear_with_lora(x, product, None, a, b, *seven, work))

    seven = tuple(getattr(step, name) for name in Step.__slots__)
    product = torch.randn(sum(first.outs), x.shape[1], device="cuda").to(dtype)
    whole = torch.empty(rows, sum(first.outs), device="cuda", dtype=dtype)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for layer in layers:
        described = describe(layer.mapping(), 64, rows).to("cuda")
        for name in Step.__slots__[:5]:
            getattr(step, name).copy_(getattr(described, name))
        step.token_lora_mapping[layer.rows :] = -1  # The wrapper does that, the reference does not.
        work.copy_(layer.work())
        graph.replay()
        h_wanted, y_wanted = torch.zeros_like(h, dtype=torch.float64), y.double()
        whole_wanted = x.double() @ product.double().T
        mapping = layer.mapping().cuda()
        for slot in set(mapping.tolist()) - {-1}:
            mine = (mapping == slot).nonzero().view(-1)
            start = 0
            for s in range(3):
                h_wanted[s, mine] = x[mine].double() @ a[s][slot, 0].double().T * 0.5
                columns = slice(start, start := start + b[s].shape[-2])
                delta = h_wanted[s, mine] @ b[s][slot, 0].double().T
                y_wanted[mine, columns] += delta
                whole_wanted[mine, columns] += 2 * delta
        of_h = h[:, : layer.rows], h_wanted[:, : layer.rows]
        for got, wanted in (of_h, (out, y_wanted), (told, y_wanted)):
            error = (got.double() - wanted).norm()
            assert error <= TOLERANCE[dtype] * wanted.norm(), (layer.rows, error)
        error = (whole.double() - whole_wanted).norm()
        assert error <= max(TOLERANCE[dtype], 1e-5) * whole_wanted.norm(), (layer.rows, error)
        again = out.clone()
        graph.replay()
        assert torch.equal(out, again)


def test_the_choice_of_block_sizes_depends_on_sizes_alone() -> None:
    """So that what is captured for a size is right for each of its steps."""
    for rows in (1, 8, 9, 64, 256, 257, 1024, 8192):
        for rank in (1, 8, 16, 17, 64, 320):
            shrink, expand = shrink_config(rows, 4096, 3, rank), expand_config(rows, 6144, rank)
            assert shrink.block_rank >= 16 and expand.block_rank >= 16
            assert shrink.rows_a_slot == expand.rows_a_slot
            assert (shrink.rows_a_slot == 0) == (rows > 256)
