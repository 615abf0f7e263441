"""Small batches of vLLM's experts: the chosen two launches, and one launch in each of its forms."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.bench.moe_inputs import MAX_LORAS, Case, Layer, Points, Product, Shape, make_case
from kernels.bench.timing import Call, in_processes, time_calls
from kernels.launching.moe_tuning import OnceConfig
from kernels.vllm.experts.choices import Choices
from kernels.vllm.experts.launch import Config, PersistentConfig, fused

PRODUCTS = ("w13", "w2")
# Columns of a tile. A program of one launch expands as many tiles as leave two programs a multiprocessor.
_TILE = 128
# Inputs of a step, and warps.
_SHRINKS = ((512, 4), (1024, 4), (1024, 8))


@dataclass(frozen=True, slots=True)
class Stacks:
    """A and B as vLLM has them: B [max_loras, experts, out, rank]."""

    lora_a: list[Tensor]
    lora_b: list[Tensor]

    @classmethod
    def of(cls, product: Product) -> "Stacks":
        turned = [b.transpose(2, 3).contiguous() for b in product.lora_b]
        return cls([a.contiguous() for a in product.lora_a], turned)


def run(points: Points, *, compiled: bool) -> Iterator[dict[str, Any]]:
    """Rows (op, shape, tokens, adapters, product, form, its sizes, us), for steps that are not sorted."""
    small = [(shape, [point for point in of_shape if point[0] <= 64]) for shape, of_shape in points]
    if not compiled:
        in_processes(compile_job, [(shape, *point) for shape, of_shape in small for point in of_shape])
    for shape, of_shape in small:
        layer = Layer.random(shape)
        stacks = {product: Stacks.of(getattr(layer, product)) for product in PRODUCTS}
        for tokens, adapters in of_shape:
            case = make_case(layer, tokens, adapters)
            for product in PRODUCTS:
                yield from _measured(case, product, stacks[product])


def compile_job(shape: Shape, tokens: int, adapters: int) -> None:
    case = make_case(Layer.random(shape), tokens, adapters)
    for product in PRODUCTS:
        stacks = Stacks.of(getattr(case.layer, product))
        for _, config in _forms(case, product, stacks):
            _call(case, product, stacks, config)(0)
    torch.cuda.synchronize()


def _measured(case: Case, product: str, stacks: Stacks) -> Iterator[dict[str, Any]]:
    forms = list(_forms(case, product, stacks))
    calls = [(_call(case, product, stacks, config), case.calls) for _, config in forms]
    for (form, config), us in zip(forms, time_calls(calls, rounds=9), strict=True):
        yield {
            "op": "vllm_experts",
            "shape": case.layer.shape.name,
            "tokens": case.tokens,
            "adapters": case.adapters,
            "product": product,
            "form": form,
            "sizes": str(config),
            "us": us,
        }


def _forms(case: Case, product: str, stacks: Stacks) -> Iterator[tuple[str, Config | None]]:
    yield "two launches", None
    slices, columns = len(stacks.lora_a), stacks.lora_b[0].shape[2]
    cores = torch.cuda.get_device_properties(0).multi_processor_count
    tiles, pairs = -(-columns // _TILE), case.tokens * case.layer.shape.topk
    for inputs, warps in _SHRINKS:
        each = min(tiles, max(1, -(-pairs * slices * tiles // (2 * cores))))
        once = OnceConfig(inputs, _TILE, -(-tiles // each), warps, 2, 2)
        yield "one launch", once
        yield "persistent", PersistentConfig(once, 2 * cores)


def _call(case: Case, product: str, stacks: Stacks, config: Config | None) -> Call:
    first, topk = product == "w13", case.layer.shape.topk
    y, x = (case.y13, case.x) if first else (case.y2, case.inner)
    made = [_choices(case, index, stacks) for index in range(case.calls)]

    def call(index: int) -> None:
        routed = None if first else case.weights[index % len(case.weights)]
        fused(
            y, x, stacks.lora_a, stacks.lora_b, made[index % len(made)], topk if first else 1, 0, routed,
            add_inputs=True, config=config,
        )  # fmt: skip

    return call


def _choices(case: Case, index: int, stacks: Stacks) -> Choices:
    runs = case.runs[index % len(case.runs)]
    slots = torch.tensor([slot for slot, rows in runs for _ in range(rows)], dtype=torch.int32, device="cuda")
    ids = torch.arange(MAX_LORAS, dtype=torch.int32, device="cuda")
    experts = case.choices[index % len(case.choices)].flatten()
    weights = case.weights[index % len(case.weights)]
    enabled = torch.ones(MAX_LORAS, dtype=torch.int32, device="cuda")
    return Choices.of(
        stacks.lora_a, weights, None, experts, None, slots, case.layer.shape.topk, ids, MAX_LORAS, enabled, 16
    )  # fmt: skip
