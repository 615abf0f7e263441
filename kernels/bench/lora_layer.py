"""What LoRA adds to a decoder layer: projections and what follows each, with LoRA and without."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from kernels.bench.inputs import LAYERS, MAX_LORAS, Layer, WeightSet, base_weights, make_case, weight_sets
from kernels.bench.layer_parts import FORMS, Projection, make_projection
from kernels.bench.timing import Call, in_processes, time_calls
from kernels.launching.follower_tuning import beside_pays, best_form
from kernels.launching.side_stream import SideStream

RANK = 16
# us a decoder layer, at (tokens, adapters); None: measured without one.
GOALS: Mapping[tuple[int, int], float | None] = {
    (1, 1): 11,
    (64, 1): 17,
    (64, 8): 25,
    (64, 16): None,
    (64, 64): 80,
    (256, 8): None,
    (256, 64): 120,
    (8192, 8): 480,
    (8192, 64): 540,
}


@dataclass(frozen=True, slots=True)
class Row:
    """us of one projection, or of all four in a row (layer "all", in the forms that best_form names).

    exposed_us: with LoRA in `form`, less base_us, the same without; pair_us to beside_us are the same
    difference for each form. All were replayed in turns.
    """

    op: str
    layer: str
    tokens: int
    adapters: int
    rank: int
    form: str
    exposed_us: float
    base_us: float
    pair_us: float | None
    pair_beside_us: float | None
    fused_us: float | None
    beside_us: float | None
    goal_us: float | None


def run(*, compiled: bool = False) -> list[dict[str, object]]:
    """compiled: what is measured is in Triton's cache already."""
    if not compiled:
        compile_all()
    shared = {layer.name: (weight_sets(layer, RANK), base_weights(layer)) for layer in LAYERS}
    return [asdict(row) for point in GOALS for row in _point_rows(*point, shared)]


def compile_all() -> None:
    in_processes(_compile, [(layer,) for layer in LAYERS])


def _compile(layer: Layer) -> None:
    for tokens, adapters in GOALS:
        side = SideStream("cuda")
        projection = _projection(layer, tokens, adapters, weight_sets(layer, RANK), base_weights(layer), side)
        for form in FORMS:
            projection.run(form, 0, projection.case.xs[0])
    torch.cuda.synchronize()


def _projection(
    layer: Layer,
    tokens: int,
    adapters: int,
    weights: list[WeightSet],
    bases: list[Tensor],
    side: SideStream,
) -> Projection:
    case = make_case(layer, tokens, adapters, [RANK] * MAX_LORAS, weights, bases)
    return make_projection(case, side)


def _point_rows(
    tokens: int, adapters: int, shared: dict[str, tuple[list[WeightSet], list[Tensor]]]
) -> list[Row]:
    side = SideStream("cuda")  # one for all, as a model has
    parts = [_projection(layer, tokens, adapters, *shared[layer.name], side) for layer in LAYERS]
    rows = [_projection_row(part) for part in parts]
    forms = [_form(part) for part in parts]
    calls = [(_layer(parts, each), _calls(tokens, 8)) for each in (["none"] * len(parts), forms)]
    base_us, with_us = time_calls(calls, rounds=25)
    point = (tokens, adapters)
    whole = Row(
        "lora_layer", "all", *point, RANK, ",".join(forms), with_us - base_us, base_us, None, None, None,
        None, GOALS[point],
    )  # fmt: skip
    return [*rows, whole]


def _form(part: Projection) -> str:
    plan = part.case.metas[0].plan
    form = best_form(plan, part.follower)
    return "pair_beside" if form == "pair" and beside_pays(plan) else form


def _projection_row(part: Projection) -> Row:
    case = part.case
    xs, calls = case.xs, _calls(case.tokens, 24)

    def in_form(form: str) -> Call:
        return lambda index: (part.run(form, index, xs[index % len(xs)]), None)[1]

    base_us, *others = time_calls([(in_form(form), calls) for form in FORMS], rounds=25)
    added = {form: us - base_us for form, us in zip(FORMS[1:], others, strict=True)}
    best = min(added, key=added.__getitem__)
    point = (case.layer.name, case.tokens, case.adapters, RANK)
    return Row(
        "lora_layer", *point, best, added[best], base_us, added["pair"], added["pair_beside"],
        added["fused"], added["beside"], None,
    )  # fmt: skip


def _layer(parts: Sequence[Projection], forms: Sequence[str]) -> Call:
    """The projections in a row, each on the result of the one before it."""

    def call(index: int) -> None:
        x = parts[-1].out
        for part, form in zip(parts, forms, strict=True):
            x = part.run(form, index, x)

    return call


def _calls(tokens: int, most: int) -> int:
    return 4 if tokens > 2048 else most
