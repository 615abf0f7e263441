"""Attention by FlashInfer, on GPUs. Needs flashinfer-python and apache-tvm-ffi (the `gpu` extra).

Below its wrappers: they copy what is on the device already, and one pinned buffer serves all their plans.
"""

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from executor.gpu.attention.planner import Kind
from executor.layers.attention import LayerCache
from executor.layers.model_config import ModelConfig
from executor.step.buffers import StepBuffers, StepShape

# Of FlashAttention: 2 for "rows", 3 for "prefill" on Hopper.
Form = Literal["fa2", "fa3"]
FORMS: tuple[Form, ...] = ("fa2", "fa3")

_NO_POSITIONS, _CAUSAL, _TOKENS_FIRST = 0, 1, 0
_HEAD_DIMS = (64, 128, 256)
_TURNS = 2
_INT_BYTES = 8 << 20
# Rows of the highest tile, and tiles on a multiprocessor: so many keep partial results at most.
_TILE_ROWS, _TILES = 128, 2


def serves(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    two_bytes = dtype in (torch.bfloat16, torch.float16)
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and two_bytes
        and config.head_dim in _HEAD_DIMS
        and not config.attention_sinks
        and find_spec("flashinfer") is not None
    )


def compile_for(config: ModelConfig, dtype: torch.dtype, device: torch.device, form: Form) -> None:
    """What a FlashInfer needs of this form, unless it is there: nvcc takes a minute or more for each."""
    if serves(config, dtype, device) and (form == "fa2" or _is_hopper(device)):
        for window in set(config.windows):
            _module(form, window, config, dtype)


class FlashInfer:
    """The attention for one model on one device; all steps on one stream. `heads` and `kv_heads` are this
    rank's."""

    def __init__(
        self, config: ModelConfig, heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, config.head_dim
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        tiles = _TILES * processors // kv_heads + 1
        partials = heads * tiles * _TILE_ROWS * (config.head_dim + 1) * 4
        workspace = torch.zeros(partials + _INT_BYTES, dtype=torch.uint8, device=device)
        self._windows = {window: _Window(window, config, dtype, workspace) for window in set(config.windows)}

    def plan(
        self, shape: StepShape, buffers: StepBuffers, kv_slots: Tensor, block_size: int, kind: Kind
    ) -> "FlashInferStep":
        """The plan for the step in `buffers`, whose rows (and what fills them up) write to `kv_slots`;
        enqueues a copy per window. Valid until the next call."""
        sequences, rows = len(shape.kv_lens), int(shape.qo_indptr[-1])
        sizes = (
            rows, sequences, self._heads, self._kv_heads, block_size, False, self._head_dim, self._head_dim,
            True,
        )  # fmt: skip
        host = tuple(map(torch.from_numpy, (shape.qo_indptr, shape.kv_indptr, shape.kv_lens)))
        plans = {window: planner.plan(host, sizes, kind) for window, planner in self._windows.items()}
        tables = (
            buffers.qo_indptr[: sequences + 1],
            buffers.kv_indptr[: sequences + 1],
            buffers.kv_indices,
            buffers.last_page_len[:sequences],
        )
        return FlashInferStep(kv_slots, rows, tables, plans, 1 / math.sqrt(self._head_dim))


@dataclass(frozen=True, slots=True)
class _Plan:
    module: Any
    info: Any
    int_workspace: Tensor
    float_workspace: Tensor
    window_left: int


def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def _module(form: Form, window: int | None, config: ModelConfig, dtype: torch.dtype) -> Any:
    """Compiled where it is not yet."""
    from flashinfer.prefill import get_batch_prefill_module

    return get_batch_prefill_module(
        form, dtype, dtype, dtype, torch.int32, config.head_dim, config.head_dim, _NO_POSITIONS,
        window is not None, config.soft_caps.scores is not None, False,
    )  # fmt: skip


class _Window:
    """The modules for layers of one window, and where their plans lie."""

    def __init__(
        self, window: int | None, config: ModelConfig, dtype: torch.dtype, workspace: Tensor
    ) -> None:
        self._window_left = -1 if window is None else window - 1
        self._rows = _module("fa2", window, config, dtype)
        hopper = _is_hopper(workspace.device)
        self._prefill = _module("fa3", window, config, dtype) if hopper else None
        self._float_workspace = workspace
        self._int_workspace = torch.zeros(_INT_BYTES, dtype=torch.uint8, device=workspace.device)
        self._pinned = [
            torch.zeros(_INT_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(_TURNS)
        ]
        self._copied = [torch.cuda.Event() for _ in range(_TURNS)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def plan(self, host: tuple[Tensor, ...], sizes: tuple[object, ...], kind: Kind) -> _Plan:
        self._turn = (self._turn + 1) % _TURNS
        self._copied[self._turn].synchronize()
        third = self._prefill if kind == "prefill" else None
        module = third or self._rows
        arguments = (
            self._float_workspace, self._int_workspace, self._pinned[self._turn], *host, *sizes,
            self._window_left,
        )  # fmt: skip
        # FlashAttention 2 also takes: no fixed split, splits allowed, no other kernel beside it.
        info = module.plan(*arguments) if third else module.plan(*arguments, -1, False, 0)
        self._copied[self._turn].record()
        return _Plan(module, info, self._int_workspace, self._float_workspace, self._window_left)


@dataclass(frozen=True, slots=True)
class FlashInferStep:
    """A StepAttention. `rows` at most are computed, whatever fills the step up behind them."""

    kv_slots: Tensor
    rows: int
    tables: tuple[Tensor, Tensor, Tensor, Tensor]
    plans: dict[int | None, _Plan]
    scale: float

    def attend(self, query: Tensor, cache: LayerCache, sinks: Tensor | None = None) -> Tensor:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        self.attend_into(out, query, cache, sinks)
        return out

    def attend_into(self, out: Tensor, query: Tensor, cache: LayerCache, sinks: Tensor | None = None) -> None:
        """Rows at and beyond `rows` are left alone."""
        if sinks is not None:
            raise ValueError("attention sinks are not for FlashInfer here: see `serves`")
        plan, keys, values = self.plans[cache.window], cache.data[0], cache.data[1]
        nothing = (None,) * 6  # masks, slopes, prefixes: of forms that we do not use
        plan.module.paged_run(
            plan.float_workspace, plan.int_workspace, plan.info, query[: self.rows], keys, values,
            *self.tables, out[: self.rows], None, _CAUSAL, _TOKENS_FIRST, plan.window_left, False,
            *nothing, cache.soft_cap or 0.0, self.scale, None, None, None, 1.0, 1e4, 0,
            plan.float_workspace.numel(),
        )  # fmt: skip
