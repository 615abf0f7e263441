"""Another implementation of expert LoRA on the same inputs: vLLM's, from an unpacked wheel."""

import contextlib
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kernels.bench.moe_inputs import MAX_LORAS, Case, Layer
from kernels.bench.timing import Call


@dataclass(frozen=True, slots=True)
class PeerWeights:
    """Its layout: A [slots, experts, rank, in], B [slots, experts, out, rank], each slice by itself; w1 is
    the base's gate and up."""

    a13: tuple[Tensor, ...]
    b13: tuple[Tensor, ...]
    a2: tuple[Tensor, ...]
    b2: tuple[Tensor, ...]
    w1: Tensor
    w2: Tensor
    enabled: Tensor


@dataclass(frozen=True, slots=True)
class MoEPeer:
    punica: Any
    experts: Any
    config: Any
    scope: Any

    @classmethod
    def load(cls, folder: Path) -> "MoEPeer":
        sys.path.insert(0, str(folder))
        config = importlib.import_module("vllm.config")
        return cls(
            importlib.import_module("vllm.lora.punica_wrapper.punica_gpu").PunicaWrapperGPU,
            importlib.import_module("vllm.model_executor.layers.fused_moe.fused_moe").fused_experts,
            config.VllmConfig(),
            config.set_current_vllm_config,
        )

    def weights(self, layer: Layer) -> PeerWeights:
        shape, first, second = layer.shape, layer.w13, layer.w2
        base = torch.randn(shape.experts, 3 * shape.inner, shape.hidden, device="cuda", dtype=torch.bfloat16)
        gate_up, down = base[:, : 2 * shape.inner], base[:, 2 * shape.inner :]
        return PeerWeights(
            tuple(weight.contiguous() for weight in first.lora_a),
            tuple(weight.transpose(2, 3).contiguous() for weight in first.lora_b),
            tuple(weight.contiguous() for weight in second.lora_a),
            tuple(weight.transpose(2, 3).contiguous() for weight in second.lora_b),
            (gate_up * 0.02).contiguous(),
            (down * 0.02).transpose(1, 2).contiguous(),
            torch.ones(MAX_LORAS + 1, dtype=torch.int32, device="cuda"),
        )

    def lora(self, case: Case, weights: PeerWeights) -> Call:
        """Its alignment, w13 and w2, each by default."""
        shape, wrappers = case.layer.shape, [self._wrapper(case, step) for step in range(len(case.runs))]
        topk, experts, tokens = shape.topk, shape.experts, case.tokens
        y13, y2 = case.y13.view(tokens, topk, -1), case.y2.view(tokens, topk, -1)

        def call(index: int) -> None:
            punica = wrappers[index % len(wrappers)]
            chosen, routed = case.choices[index % len(case.choices)], case.weights[index % len(case.weights)]
            with self._current():
                state = punica.add_lora_w13(
                    y13, case.x, weights.a13, weights.b13, chosen, routed, None, weights.w1, weights.w2,
                    tokens, topk, MAX_LORAS, weights.enabled, experts, topk, 2, False, False,
                )  # fmt: skip
                punica.add_lora_w2(
                    y2, case.inner, weights.a2, weights.b2, routed, *state[:4], tokens, weights.w1,
                    weights.w2, topk, MAX_LORAS, weights.enabled, topk, False, 0, False,
                )  # fmt: skip

        return call

    def base(self, case: Case, weights: PeerWeights) -> Call:
        def call(index: int) -> None:
            turn = index % len(case.choices)
            with self._current():
                self.experts(case.x, weights.w1, weights.w2, case.weights[turn], case.choices[turn])

        return call

    @contextlib.contextmanager
    def _current(self) -> Any:
        with torch.inference_mode(), self.scope(self.config):
            yield

    def _wrapper(self, case: Case, step: int) -> Any:
        limits = SimpleNamespace(max_loras=MAX_LORAS, specialize_active_lora=False)
        with self._current():
            punica = self.punica(max(case.tokens, 16), 256, torch.device("cuda"), lora_config=limits)
            slots = [slot for slot, rows in case.runs[step] for _ in range(rows)]
            mapping = torch.tensor(slots, dtype=torch.int32, device="cuda")
            punica.token_mapping_meta.prepare_tensors(mapping)
        return punica
