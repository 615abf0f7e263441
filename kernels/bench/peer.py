"""Another implementation on the same inputs: vLLM's shrink and expand, from an unpacked wheel."""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.bench.inputs import MAX_LORAS, Case, runs
from kernels.bench.timing import Call

_TUNED = "VLLM_TUNED_CONFIG_FOLDER"


@dataclass(frozen=True, slots=True)
class Peer:
    """vLLM's ops."""

    ops: Any
    utils: Any

    @classmethod
    def load(cls, folder: Path) -> "Peer":
        sys.path.insert(0, str(folder))
        return cls(
            importlib.import_module("vllm.lora.ops.triton_ops"),
            importlib.import_module("vllm.lora.ops.triton_ops.utils"),
        )

    def _select(self, tuned: Path | None) -> None:
        os.environ.pop(_TUNED, None)
        if tuned is not None:
            os.environ[_TUNED] = str(tuned)
        self.utils.load_lora_op_config.cache_clear()
        self.utils.get_lora_op_configs.cache_clear()

    def pair(self, case: Case, tuned: Path | None) -> Call:
        """Its shrink (with the zeroing that it needs) and expand, over the case's rotating inputs.

        tuned: a folder in its tuning format, None: its defaults. The last call of `pair` decides for all.
        """
        self._select(tuned)
        self.utils._LORA_A_PTR_DICT.clear()
        self.utils._LORA_B_PTR_DICT.clear()
        rank = case.weights[0].lora_a[0].shape[1]
        weights = [reference_layout(case, number) for number in range(len(case.weights))]
        metas = [self._meta(case, rotation) for rotation in range(len(case.metas))]
        slices = len(case.layer.slices)
        hidden = [torch.zeros(slices, case.tokens, rank, device="cuda") for _ in case.xs]
        shrink, expand = self.ops.lora_shrink, self.ops.lora_expand

        def call(index: int) -> None:
            meta = metas[index % len(metas)]
            lora_a, lora_b = weights[(index // len(metas)) % len(weights)]
            turn = index % len(hidden)
            shrink(case.xs[turn], lora_a, hidden[turn], *meta, 1.0)
            expand(hidden[turn], lora_b, case.ys[turn], *meta, offset_start=0, add_inputs=True)

        _fill_pointer_tables(call, len(metas) * len(weights), len(metas))
        return call

    def _meta(self, case: Case, rotation: int) -> Any:
        meta = self.ops.LoRAKernelMeta.make(MAX_LORAS, case.tokens, "cuda")
        slots = [slot for slot, rows in runs(case.tokens, case.adapters, rotation) for _ in range(rows)]
        meta.prepare_tensors(torch.tensor(slots, dtype=torch.int32, device="cuda"))
        return meta.meta_args(case.tokens, False)


def reference_layout(case: Case, number: int) -> tuple[list[Tensor], list[Tensor]]:
    """Its layout: A [slots, 1, rank, in], B [slots, 1, out, rank], each slice by itself."""
    own = case.weights[number]
    lora_a = [weight.contiguous().unsqueeze(1) for weight in own.lora_a]
    lora_b = [weight.transpose(1, 2).contiguous().unsqueeze(1) for weight in own.lora_b]
    return lora_a, lora_b


def _fill_pointer_tables(call: Callable[[int], None], calls: int, stride: int) -> None:
    """Its tables of weight pointers are made at first use, which must not happen inside a capture."""
    for index in range(0, calls, stride):
        call(index)
    torch.cuda.synchronize()
