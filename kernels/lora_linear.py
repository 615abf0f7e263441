"""Shrink and expand of one layer as one call that does on the host only what can change between calls."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import call, is_
from weakref import ref

import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.launching.checks import check, check_hidden_block, check_rows
from kernels.launching.side_stream import SideStream
from kernels.launching.tuning import ExpandConfig, ShrinkConfig, expand_config, shrink_config
from kernels.lora_expand import ExpandLaunch, expand_launch, lora_expand
from kernels.lora_shrink import ShrinkLaunch, lora_shrink, shrink_launch
from kernels.metadata.launch_plan import LaunchPlan
from kernels.metadata.meta import LoRAKernelMeta

# Far more than a model's layers. Beyond it somebody passes new tensors in each call: start afresh.
_MOST_LAYERS = 4096
# Of a layer, far more than there are choices of the tuning. Beyond it x or y come in ever new forms.
_MOST_FORMS = 256


def add_pair(
    y: Tensor,
    x: Tensor,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    ranks: Tensor,
    scales: Tensor,
    column_starts: Sequence[int],
    meta: LoRAKernelMeta,
) -> None:
    """y[row, start_s : start_s + out_s] += (scale * x[row] @ A_s[slot, :r].T) @ B_s[slot, :r].

    As lora_shrink and lora_expand, with their checks. A layer's weights are checked when these tensor objects
    come for the first time or with other memory, x and y in every call. Raises KernelArgumentError.
    """
    weights = (*lora_a, *lora_b, ranks, scales)
    # The ids choose an entry; only the same living objects, at the same addresses, confirm it.
    key = (len(lora_a), *map(id, weights))
    linear: LinearPair | None = meta.linears.get(key)
    if linear is None or not linear.is_of(weights, column_starts):
        if len(meta.linears) >= _MOST_LAYERS:
            meta.linears.clear()
        _check_stacks(lora_a=lora_a, lora_b=lora_b)
        linear = meta.linears[key] = LinearPair(weights, column_starts)
    linear(y, x, lora_a, lora_b, ranks, scales, meta)


def add_pair_beside(
    product: Callable[[], Tensor],
    side: SideStream,
    x: Tensor,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    ranks: Tensor,
    scales: Tensor,
    column_starts: Sequence[int],
    meta: LoRAKernelMeta,
) -> Tensor:
    """y = product(), then as add_pair; shrink runs beside the product. Returns y.

    Meant for captured graphs: each call looks both launches up. `follower_tuning.beside_pays` says when.
    """
    config = shrink_config(meta.plan, len(lora_a), x.shape[-1], x.element_size(), final=True)
    h = torch.empty((len(lora_a), meta.num_rows, lora_a[0].shape[1]), dtype=torch.float32, device=x.device)
    y = side.run_beside(product, partial(lora_shrink, h, x, lora_a, ranks, scales, meta, config))
    lora_expand(y, h, lora_b, ranks, column_starts, meta)
    return y


@dataclass(frozen=True, slots=True, eq=False)
class _Choice:
    """What a step's plan decides about a layer's launches, but for the sizes of their grids. Equal ones are
    one object, so that comparing them costs nothing."""

    shrink: ShrinkConfig
    expand: ExpandConfig
    parts: bool


_choice = lru_cache(maxsize=1024)(_Choice)


@lru_cache(maxsize=1024)
def _choice_of(plan: LaunchPlan, slices: int, width: int, x_bytes: int, b_bytes: int) -> _Choice:
    """Prefill has ever new plans and few choices. Kept by plan, what 128 layers know of launches came to
    450,000 objects after 250 steps, which a full collection of garbage took 200 ms to look through."""
    return _choice(shrink_config(plan, slices, width, x_bytes), expand_config(plan, b_bytes), plan.parts)


class _Form:
    """The launches for one choice and for x and y of some form; h is [*splits, slices, rows, max_rank]."""

    def __init__(
        self, shrink: ShrinkLaunch, expand: ExpandLaunch, splits: tuple[int, ...], max_rank: int
    ) -> None:
        self._shrink, self._expand = shrink, expand
        self._splits, self._max_rank = splits, max_rank
        self._bound: tuple[Callable[..., None], Callable[..., None]] | None = None

    def __call__(
        self,
        y: Tensor,
        x: Tensor,
        lora_a: Sequence[Tensor],
        lora_b: Sequence[Tensor],
        ranks: Tensor,
        scales: Tensor,
        meta: LoRAKernelMeta,
    ) -> None:
        """x and y must be of the form and have the step's rows: nothing is checked here."""
        if meta.plan.items == 0:
            return
        rows = meta.num_rows
        h = torch.empty((*self._splits, rows, self._max_rank), dtype=torch.float32, device=x.device)
        if self._bound is None:
            self._shrink(h, x, lora_a[0], ranks, scales, meta)
            self._expand(y, h, lora_b, ranks, ranks, meta)
            shrink = self._shrink.bound(lora_a[0], ranks, scales, meta)
            expand = self._expand.bound(lora_b, ranks, ranks, meta)
            self._bound = None if shrink is None or expand is None else (shrink, expand)
            return
        shrink, expand = self._bound
        partials, at_h = self._shrink.partials(h), h.data_ptr()
        at_partials = at_h if partials is h else partials.data_ptr()
        shrink(self._shrink.grid(meta), rows, at_h, at_partials, x.data_ptr())
        expand(self._expand.grid(meta), rows, y.data_ptr(), at_h)


class LinearPair:
    """The launches of one layer. Holds no tensor: who replaces a layer's weights gets their memory back."""

    def __init__(self, weights: Sequence[Tensor], column_starts: Sequence[int]) -> None:
        self._weights = [ref(weight) for weight in weights]
        self._addresses = list(map(Tensor.data_ptr, weights))
        self._starts = list(column_starts)
        self._forms: dict[Hashable, _Form] = {}

    def is_of(self, weights: Sequence[Tensor], column_starts: Sequence[int]) -> bool:
        alive = all(map(is_, map(call, self._weights), weights))
        # A living object may have been given other memory: x.data = y.
        there = alive and self._addresses == list(map(Tensor.data_ptr, weights))
        return there and self._starts == list(column_starts)

    def __call__(
        self,
        y: Tensor,
        x: Tensor,
        lora_a: Sequence[Tensor],
        lora_b: Sequence[Tensor],
        ranks: Tensor,
        scales: Tensor,
        meta: LoRAKernelMeta,
    ) -> None:
        """The arguments but x, y and meta are the layer's."""
        width = _width(x, "x", meta)
        choice = _choice_of(meta.plan, len(lora_a), width, x.element_size(), lora_b[0].element_size())
        key = (
            choice,
            width, x.stride(), x.dtype, x.device, x.data_ptr() % 16,
            _width(y, "y", meta), y.stride(), y.dtype, y.device, y.data_ptr() % 16,
        )  # fmt: skip
        form = self._forms.get(key)
        if form is None:
            if len(self._forms) >= _MOST_FORMS:
                self._forms.clear()
            form = self._forms[key] = self._make(choice, y, x, lora_a, lora_b, ranks, scales, meta)
        form(y, x, lora_a, lora_b, ranks, scales, meta)

    def _make(
        self,
        choice: _Choice,
        y: Tensor,
        x: Tensor,
        lora_a: Sequence[Tensor],
        lora_b: Sequence[Tensor],
        ranks: Tensor,
        scales: Tensor,
        meta: LoRAKernelMeta,
    ) -> _Form:
        shrink = choice.shrink
        splits = (len(lora_a),) if shrink.final else (shrink.split, len(lora_a))
        h = torch.empty((*splits, meta.num_rows, lora_a[0].shape[1]), dtype=torch.float32, device=x.device)
        # A launch that is known is not checked again, so not against this h either.
        check_hidden_block(h, lora_a[0], len(lora_a), meta)
        check_hidden_block(h, lora_b[0], len(lora_b), meta)
        return _Form(
            shrink_launch(h, x, lora_a, ranks, scales, meta, shrink),
            expand_launch(y, h, lora_b, ranks, self._starts, meta, choice.expand),
            splits,
            lora_a[0].shape[1],
        )


def _check_stacks(**stacks: Sequence[Tensor]) -> None:
    for name, stack in stacks.items():
        holds = len(stack) > 0 and stack[0].dim() == 3
        check(holds, name, "must hold slices [max_loras, max_rank, width]")


def _width(rows: Tensor, argument: str, meta: LoRAKernelMeta) -> int:
    """The width of a tensor that is [the step's rows, width]."""
    shape = rows.shape
    if len(shape) != 2 or shape[0] != meta.num_rows:
        check_rows(rows, argument, meta)
        raise KernelArgumentError(argument, f"must be [rows, width], has shape {tuple(shape)}")
    return shape[1]
