"""What compiled kernels are started with. None is compiled without a GPU: a recorder takes their place."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import lora_expand, lora_linear, lora_shrink
from kernels.launching import launch
from kernels.lora_linear import LinearPair
from kernels.metadata.launch_plan import LaunchPlan
from kernels.metadata.meta import LoRAMapping
from kernels.metadata.work_list import Run
from kernels.punica_gpu import PunicaWrapperGPU
from tests.kernels.stack import Stack, make_stack

COMPILED = ("function", "packed metadata", None, None, None)
STREAM = 7


class Recorder:
    """As a triton.jit function: keeps what each call passes, by argument, tensors as addresses."""

    def __init__(self, kernel: Any) -> None:
        self.arg_names = kernel.arg_names
        self.through_triton: list[dict[str, object]] = []
        self.short: list[dict[str, object]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        def compile_and_start(*arguments: object, num_warps: int, num_stages: int, **rest: object) -> object:
            passed = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]
            constants = [rest[name] for name in self.arg_names if name in rest]
            self.through_triton.append(self._named(grid, passed + constants))
            return SimpleNamespace(function=COMPILED[0], packed_metadata=COMPILED[1], run=self._run)

        return compile_and_start

    def _run(self, *arguments: object) -> None:
        assert arguments[3:9] == (STREAM, *COMPILED)
        self.short.append(self._named(arguments[:3], arguments[9:]))

    def _named(self, grid: Sequence[object], values: Sequence[object]) -> dict[str, object]:
        return {"grid": grid, **dict(zip(self.arg_names, values, strict=True))}


def without_scratch(call: dict[str, object]) -> dict[str, object]:
    """Without what every call allocates."""
    return {name: value for name, value in call.items() if name not in ("h", "partials")}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> tuple[Recorder, Recorder]:
    """(shrink, expand)."""
    shrink, expand = Recorder(lora_shrink.shrink_kernel), Recorder(lora_expand.expand_kernel)
    monkeypatch.setattr(lora_shrink, "shrink_kernel", shrink)
    monkeypatch.setattr(lora_expand, "expand_kernel", expand)
    active = SimpleNamespace(get_current_stream=lambda device: STREAM, get_current_device=lambda: 0)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    return shrink, expand


def prepared(runs: list[Run], plan: LaunchPlan | None = None) -> PunicaWrapperGPU:
    punica = PunicaWrapperGPU(2, 64, "cpu")
    punica.update_metadata(LoRAMapping(tuple(runs), ()), plan)
    return punica


def add(punica: PunicaWrapperGPU, stack: Stack, y: Tensor, x: Tensor) -> None:
    punica.add_lora_linear(y, x, stack.lora_a, stack.lora_b, stack.ranks, stack.scales, stack.column_starts)


@pytest.mark.parametrize("slices", [1, 2, 3])
@pytest.mark.parametrize("in_features", [40, 9000], ids=["one split", "splits added by shrink"])
def test_a_known_form_starts_with_what_triton_was_given(
    slices: int, in_features: int, kernels: tuple[Recorder, Recorder]
) -> None:
    stack = make_stack([[4, 4]] * slices, in_features, [32, 8, 16][:slices], max_rank=4)
    punica, x, y = prepared([(0, 2), (1, 1)]), torch.ones(3, in_features), torch.ones(3, 80)
    for _ in range(3):
        add(punica, stack, y, x)
    for kernel in kernels:
        (first,) = map(without_scratch, kernel.through_triton)
        assert [without_scratch(call) for call in kernel.short] == [first, first]
    for shrunk, expanded in zip(kernels[0].short, kernels[1].short, strict=True):
        assert shrunk["h"] == expanded["h"]
        assert (shrunk["partials"] == shrunk["h"]) == (in_features == 40)


def test_a_plan_starts_with_the_rows_and_addresses_of_each_call(kernels: tuple[Recorder, Recorder]) -> None:
    """A tensor object whose memory is replaced is the same object: its address is read in every call."""
    stack, other = (make_stack([[4, 4]] * 2, 40, [32, 8], max_rank=4) for _ in range(2))
    plan = LaunchPlan.for_graph(12, 2, rows_per_item=1)
    punica, (shrink, expand) = prepared([(0, 2)], plan), kernels
    for rows in (2, 12, 5):
        punica.update_metadata(LoRAMapping(((0, rows),), ()), plan)
        x, y = torch.ones(rows, 40), torch.ones(rows, 46)
        add(punica, stack, y, x)
    stack.lora_b[1].data, stack.scales.data = other.lora_b[1], other.scales
    add(punica, stack, y, x)
    assert [call["num_rows"] for call in shrink.short] == [12, 5, 5]
    assert [call["num_rows"] for call in expand.short] == [12, 5, 5]
    last = {**shrink.short[-1], **expand.short[-1]}
    assert (last["x"], last["y"]) == (x.data_ptr(), y.data_ptr())
    assert (last["b0"], last["b1"]) == (stack.lora_b[0].data_ptr(), other.lora_b[1].data_ptr())
    assert last["scales"] == other.scales.data_ptr()


def test_weights_whose_memory_is_replaced_are_compiled_and_found_anew(
    kernels: tuple[Recorder, Recorder],
) -> None:
    """What a launch knows of its weights' memory: where slices lie from the first one, and the alignment."""
    stack, other = (make_stack([[4, 4]] * 3, 40, [32, 8, 16], max_rank=4) for _ in range(2))
    punica, x, y = prepared([(0, 2), (1, 1)]), torch.ones(3, 40), torch.ones(3, 80)

    def third_a() -> list[Any]:
        """Where the next two calls find it: one through Triton, one that is known."""
        add(punica, stack, y, x)
        add(punica, stack, y, x)
        calls: list[Any] = [kernels[0].through_triton[-1], kernels[0].short[-1]]
        return [call["a"] + 4 * call["offset2"] for call in calls]

    assert third_a() == [stack.lora_a[2].data_ptr()] * 2
    stack.lora_a[2].data = other.lora_a[2]
    assert third_a() == [other.lora_a[2].data_ptr()] * 2
    compiled = [len(kernel.through_triton) for kernel in kernels]
    for weights in (stack.lora_a, stack.lora_b):
        unaligned = torch.empty(stack.arena.numel() + 1)
        weights[0].data = unaligned.as_strided(weights[0].shape, weights[0].stride(), 1)
    third_a()
    assert [len(kernel.through_triton) for kernel in kernels] == [number + 1 for number in compiled]


def test_each_form_of_rows_has_launches_of_its_own_and_each_plan_its_grid(
    kernels: tuple[Recorder, Recorder],
) -> None:
    """Triton compiles for dtypes, strides, alignments."""
    stack, memory = make_stack([[4, 4]], 40, [32], max_rank=4), torch.ones(3, 60)
    punica, (shrink, expand) = prepared([(0, 2), (1, 1)]), kernels
    x, y = torch.ones(3, 40), torch.ones(3, 35)
    for form in (x, memory[:, :40], memory[:, 1:41], x):
        add(punica, stack, y, form)
    assert len(shrink.through_triton) == 3
    assert len(expand.through_triton) == 1
    for form in (y.double(), memory[:, :35], memory[:, 1:36], y):
        add(punica, stack, form, x)
    assert len(shrink.through_triton) == 3
    assert len(expand.through_triton) == 4
    for runs in ([(0, 3)], [(0, 1), (-1, 2)], [(1, 1), (-1, 2)], [(0, 3)]):
        punica.update_metadata(LoRAMapping(tuple(runs), ()))
        add(punica, stack, y, x)
        entries = punica.token_mapping_meta.plan.items
        assert [kernel.short[-1]["grid"] for kernel in kernels] == [(1, 1, entries), (1, entries, 1)]


def test_steps_of_ever_new_sizes_leave_nothing_behind(kernels: tuple[Recorder, Recorder]) -> None:
    """Prefill has steps with ever new numbers of rows. What was kept of each made full collections of garbage
    stop all streams for 200 ms, and what was made for each was half of such a step's launch."""
    stack = make_stack([[4, 4]], 40, [32], max_rank=4)
    punica = prepared([(0, 2)])
    (shrink, expand), plans = kernels, set()

    def steps(sizes: range) -> None:
        for rows in sizes:
            punica.update_metadata(LoRAMapping(((0, 2 * rows), (-1, 60 - 2 * rows)), ()))
            plans.add(plan := punica.token_mapping_meta.plan)
            add(punica, stack, torch.ones(60, 35), torch.ones(60, 40))
            grids = [call["grid"] for kernel in kernels for call in kernel.short[-1:]]
            assert grids in ([], [(1, 1, plan.items), (1, plan.items, 1)])

    steps(range(5, 20))
    (pair,) = punica.token_mapping_meta.linears.values()
    forms, launches = list(pair._forms.values()), len(punica.token_mapping_meta.launches)
    steps(range(20, 30))
    assert len(plans) > 20
    assert list(pair._forms.values()) == forms and len(forms) <= 2
    assert len(punica.token_mapping_meta.launches) == launches
    assert len(shrink.short) == len(expand.short) == 25 - len(forms)


def test_a_layer_keeps_a_bounded_number_of_forms(
    kernels: tuple[Recorder, Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever passes rows of ever new strides must not fill the memory."""
    monkeypatch.setattr(lora_linear, "_MOST_FORMS", 4)
    stack = make_stack([[4, 4]], 40, [32], max_rank=4)
    punica = prepared([(0, 2)])
    for more in range(20):
        for _ in range(2):
            add(punica, stack, torch.ones(2, 35), torch.ones(2, 40 + 4 * more)[:, :40])
    (pair,) = punica.token_mapping_meta.linears.values()
    assert 1 <= len(pair._forms) <= 4
    assert len(kernels[0].short) == len(kernels[0].through_triton) == 20


def test_a_step_without_adapters_starts_nothing(kernels: tuple[Recorder, Recorder]) -> None:
    stack = make_stack([[4, 4]], 40, [32], max_rank=4)
    x, y = torch.ones(3, 40), torch.ones(3, 35)
    punica = prepared([(0, 2), (1, 1)], LaunchPlan(16, 8, 3, 0, parts=False))
    add(punica, stack, y, x)
    punica.update_metadata(LoRAMapping(((-1, 3),), ()))
    for _ in range(3):
        add(punica, stack, y, x)
    assert not any(kernel.short for kernel in kernels)


def test_launches_are_of_the_same_living_tensors_only() -> None:
    """Another tensor may have a dead one's id, which chooses the launches."""
    weights = [torch.ones(1) for _ in range(4)]
    pair = LinearPair(weights, [0])
    assert pair.is_of(weights, (0,))
    assert not pair.is_of(weights, [1])
    for place in range(4):
        others = list(weights)
        others[place] = torch.ones(1)
        assert not pair.is_of(others, [0])
    weights[3] = weights[3].clone()  # nothing holds the old one now
    assert not pair.is_of(weights, [0])
