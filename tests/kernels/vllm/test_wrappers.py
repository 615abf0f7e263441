"""The dense methods on CPU tensors against arithmetic row by row, and as a compiler traces them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from kernels.errors import KernelArgumentError
from kernels.vllm.punica_cpu import PunicaWrapperCPU
from kernels.vllm.punica_gpu import PunicaWrapperGPU, PunicaWrapperGPU33
from tests.kernels.vllm.steps import MAX_LORAS, SLOTS, Config, Mapping, random_mapping, slot_of

ROWS, WIDTH, RANK, VOCAB = 24, 48, 8, 50
OUTS = (32, 16, 16)


Wrapper = PunicaWrapperGPU | PunicaWrapperCPU
BOTH = pytest.mark.parametrize("kind", [PunicaWrapperGPU, PunicaWrapperCPU])


def wrapper(kind: type[Wrapper], mapping: Mapping) -> Wrapper:
    punica = kind(ROWS, max_batches=ROWS, device="cpu", lora_config=Config(MAX_LORAS))
    punica.update_metadata(mapping, SLOTS, MAX_LORAS + 1, VOCAB)
    return punica


def stack(*sizes: int) -> Tensor:
    return torch.randn(MAX_LORAS, 1, *sizes).to(torch.bfloat16) / sizes[-1] ** 0.5


def expected(y: Tensor, x: Tensor, a: tuple[Tensor, ...], b: tuple[Tensor, ...], slots: list[int]) -> Tensor:
    """y in float64 after the adapters' products, row by row and slice by slice."""
    y = y.double().clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            deltas = [
                x[row].double() @ lora_a[slot, 0].double().T @ lora_b[slot, 0].double().T
                for lora_a, lora_b in zip(a, b, strict=True)
            ]
            y[row] += torch.cat(deltas)
    return y


def close(ours: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(ours.double(), truth, rtol=2e-2, atol=2e-2)


@BOTH
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("outs", [OUTS[:1], OUTS])
def test_linear(kind: type[Wrapper], seed: int, outs: tuple[int, ...]) -> None:
    torch.manual_seed(seed)
    mapping = random_mapping(seed, ROWS)
    slots = [slot_of(adapter) for adapter in mapping.index_mapping]
    punica, x = wrapper(kind, mapping), torch.randn(len(slots), WIDTH).to(torch.bfloat16)
    a = tuple(stack(RANK, WIDTH) for _ in outs)
    b = tuple(stack(out, RANK) for out in outs)
    y = torch.randn(len(slots), sum(outs)).to(torch.bfloat16)
    truth, before = expected(y, x, a, b, slots), y.clone()
    punica.add_lora_linear(y, x, a, b, 1.0, outs)
    close(y, truth)
    base = [row for row, slot in enumerate(slots) if slot < 0]
    assert torch.equal(y[base], before[base])
    # Beside the base's product, on a stream of its own: the adapters' part alone, into zeros.
    part = torch.zeros_like(y)
    punica.add_lora_linear(part, x, a, b, 1.0, outs, add_inputs=False)
    close(part.double() + before.double(), truth)


@BOTH
def test_shrink_and_expand_apart_as_sharded_layers_call_them(kind: type[Wrapper]) -> None:
    torch.manual_seed(0)
    mapping = random_mapping(4, ROWS)
    slots = [slot_of(adapter) for adapter in mapping.index_mapping]
    punica, x = wrapper(kind, mapping), torch.randn(1, len(slots), WIDTH).to(torch.bfloat16)
    a, b = (stack(RANK, WIDTH),), (stack(16, RANK),)
    hidden = torch.full((1, len(slots), RANK), torch.nan)
    punica.add_shrink(hidden, x, a, 0.5)
    y = torch.randn(1, len(slots), 48).to(torch.bfloat16)
    truth = y[0].double().clone()
    truth[:, 32:] = expected(y[0, :, 32:], x[0] * 0.5, a, b, slots)
    punica.add_expand(y, hidden, b, (16,), offset_start=32, add_input=True)
    close(y[0], truth)


@BOTH
def test_the_embedding_adds_what_the_layer_looked_up(kind: type[Wrapper]) -> None:
    torch.manual_seed(0)
    mapping = random_mapping(5, ROWS)
    slots = [slot_of(adapter) for adapter in mapping.index_mapping]
    punica, looked_up = wrapper(kind, mapping), torch.randn(len(slots), RANK).to(torch.bfloat16)
    b, y = stack(16, RANK), torch.randn(len(slots), 16).to(torch.bfloat16)
    eye = torch.eye(RANK).expand(MAX_LORAS, 1, RANK, RANK)
    truth = expected(y, looked_up, (eye,), (b,), slots)
    punica.add_lora_embedding(y, looked_up, b, add_input=True)
    close(y, truth)


@BOTH
def test_logits_follow_the_rows_that_reach_the_head(kind: type[Wrapper]) -> None:
    torch.manual_seed(0)
    mapping = Mapping((5, 5, 31, 0, 700), (31, 0, 5))
    slots = [slot_of(adapter) for adapter in mapping.prompt_mapping]
    punica, x = wrapper(kind, mapping), torch.randn(3, WIDTH).to(torch.bfloat16)
    a, b, y = stack(RANK, WIDTH), stack(VOCAB, RANK), torch.randn(3, VOCAB).to(torch.bfloat16)
    truth = expected(y, x, (a,), (b,), slots)
    punica.add_lora_logits(y, x, a, b, 1.0)
    close(y, truth)


@BOTH
@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("output_slices", lambda p, y, x, a, b: p.add_lora_linear(y, x, (a,), (b,), 1.0, (8, 8))),
        ("add_inptus", lambda p, y, x, a, b: p.add_expand(y, x, (b,), (16,), add_inptus=False)),
        ("add_input", lambda p, y, x, a, b: p.add_lora_embedding(y, x, b, add_input=False)),
    ],
)
def test_bad_arguments_are_refused_by_name(kind: type[Wrapper], argument: str, call: Any) -> None:
    punica = wrapper(kind, Mapping((5, 31), (5, 31)))
    y, x = torch.zeros(2, 16), torch.zeros(2, WIDTH)
    with pytest.raises(KernelArgumentError) as refused:
        call(punica, y, x, stack(RANK, WIDTH), stack(16, RANK))
    assert refused.value.argument == argument


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("buffer", lambda p, y, x, a, b: p.add_lora_linear(y, x, (a,), (b,), 1.0, (16,), buffer=x)),
        ("buffer", lambda p, y, x, a, b: p.add_lora_logits(y, x, a, b, 1.0, buffer=x)),
        ("x", lambda p, y, x, a, b: p.add_expand(y, x, (b,), (16,))),
    ],
)
def test_on_a_gpu_buffers_are_the_wrappers_own(argument: str, call: Any) -> None:
    test_bad_arguments_are_refused_by_name(PunicaWrapperGPU, argument, call)


def test_on_a_cpu_buffers_may_be_passed_and_padding_may_differ() -> None:
    torch.manual_seed(0)
    punica, x = wrapper(PunicaWrapperCPU, Mapping((5, 0), (5, 0))), torch.randn(2, WIDTH)
    a, b, y = stack(RANK, WIDTH), stack(16, RANK), torch.zeros(2, 12)
    hidden = torch.full((2, RANK), torch.nan)
    punica.add_lora_logits(y, x, a, b, 1.0, buffer=hidden)
    close(y, expected(y * 0, x, (a,), (b[:, :, :12],), [1, -1]))
    close(hidden, expected(hidden * 0, x, (a,), (torch.eye(RANK).expand(MAX_LORAS, 1, RANK, RANK),), [1, -1]))


def test_on_a_cpu_what_is_in_a_slot_reaches_its_own_rows_alone() -> None:
    punica, x = wrapper(PunicaWrapperCPU, Mapping((5, 0, 700), (5,))), torch.ones(3, WIDTH)
    a, b = stack(RANK, WIDTH), stack(16, RANK)
    a[0], b[0], y = torch.nan, torch.inf, torch.zeros(3, 16)
    punica.add_lora_linear(y, x, (a,), (b,), 1.0, (16,))
    assert y.isnan().any(dim=1).tolist() == [False, False, True]


def test_prefill_metadata_counts_neighbours_of_one_slot_as_one() -> None:
    punica = wrapper(PunicaWrapperCPU, Mapping((5, 5, 0, 31, 31, 31), (5,), is_prefill=True))
    starts, lengths, slots, *numbers = punica.prefill_metadata
    assert (starts.tolist(), lengths.tolist(), slots.tolist()) == ([0, 2, 3], [2, 1, 3], [1, -1, 3])
    assert (numbers, punica.no_lora, punica.is_prefill) == ([3, 3, 6], False, True)
    punica.update_metadata(Mapping((0, 0), (0,), is_prefill=True), SLOTS, MAX_LORAS + 1, VOCAB)
    assert punica.no_lora


@BOTH
def test_a_classifier_that_an_adapter_brings_whole(kind: type[Wrapper]) -> None:
    torch.manual_seed(0)
    mapping = Mapping((5, 5, 31, 0, 700), (31, 0, 5, 700))
    punica, x, labels = wrapper(kind, mapping), torch.randn(4, WIDTH).to(torch.bfloat16), 3
    weight, bias = stack(labels, WIDTH), torch.randn(MAX_LORAS, labels)
    weight[0], enabled = torch.nan, torch.tensor([False, True, True, True])
    y = torch.randn(4, labels).to(torch.bfloat16)
    truth = y.double().clone()
    for row, slot in ((0, 3), (2, 1)):
        truth[row] = x[row].double() @ weight[slot, 0].double().T + bias[slot].double()
    punica.apply_lora_full_linear(y, x, weight, bias, enabled)
    close(y, truth)
    with pytest.raises(KernelArgumentError, match="weight_stacked"):
        punica.apply_lora_full_linear(y, x, weight[:, :, :2], bias, enabled)
    with pytest.raises(KernelArgumentError, match="4 rows"):
        punica.update_metadata(Mapping((5,), (5,)), SLOTS, MAX_LORAS + 1, VOCAB)
        punica.apply_lora_full_linear(y, x, weight, bias, enabled)


def test_a_later_version_reads_one_row_of_offsets() -> None:
    punica = wrapper(PunicaWrapperGPU33, Mapping((5, 0, 31), (5,)))
    assert punica.embeddings_indices.tolist() == [VOCAB, 0, 3 * VOCAB]
    assert punica._embeddings_indices[:3].tolist() == [VOCAB, 0, 3 * VOCAB]


class Layer(nn.Module):
    """A linear layer with adapters around it, as vLLM's apply them."""

    def __init__(self, punica: Wrapper) -> None:
        super().__init__()
        self.punica, self.base = punica, nn.Linear(WIDTH, sum(OUTS), dtype=torch.bfloat16)
        self.a = tuple(stack(RANK, WIDTH) for _ in OUTS)
        self.b = tuple(stack(out, RANK) for out in OUTS)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        self.punica.add_lora_linear(y, x, self.a, self.b, 1.0, OUTS)
        return y


@pytest.mark.parametrize(
    ("kind", "backend"),
    [(PunicaWrapperGPU, "eager"), (PunicaWrapperGPU, "aot_eager"), (PunicaWrapperCPU, "eager")],
)
def test_a_traced_layer_reads_each_step_anew(kind: type[Wrapper], backend: str) -> None:
    """One graph without a break serves steps of other rows, adapters and groups, and none at all."""
    torch.manual_seed(0)
    punica = wrapper(kind, Mapping((5,) * 4, (5,)))
    layer = Layer(punica)
    graphs = CompileCounterWithBackend(backend)
    traced = torch.compile(layer, backend=graphs, fullgraph=True)
    for adapters in [(5,) * 7, (31, 0, 700, 31, 5, 0), (0,) * 3, (700,) * 5]:
        punica.update_metadata(Mapping(adapters, adapters), SLOTS, MAX_LORAS + 1, VOCAB)
        x = torch.randn(len(adapters), WIDTH).to(torch.bfloat16)
        torch._dynamo.mark_dynamic(x, 0)
        with torch.inference_mode():
            truth = expected(layer.base(x), x, layer.a, layer.b, [slot_of(each) for each in adapters])
            close(traced(x), truth)
    assert graphs.frame_count == 1
