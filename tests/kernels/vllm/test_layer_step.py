"""The step of vLLM's linear layers that ours stands in for: which layers take it, and what they answer."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kernels.vllm.dense.layer_step import take_over
from kernels.vllm.punica_gpu import PunicaWrapperGPU
from tests.kernels.vllm.steps import MAX_LORAS, SLOTS, Config, Mapping

LAYERS = """
import torch
class BaseLinearLayerWithLoRA:
    def _get_quant_method(self):
        return self.method
    def _apply_sync(
        self, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        output = self._get_quant_method().apply(self.base_layer, x, bias)
        return self._apply_lora_to_output(x, output)
    def _apply_lora_to_output(self, x, output):
        shape = output.shape
        x, output = x.view(-1, x.shape[-1]), output.view(-1, output.shape[-1])
        self.punica_wrapper.add_lora_linear(
            output, x, self.lora_a_stacked, self.lora_b_stacked, 1.0, self.output_slices
        )
        return output.view(shape)
"""
LINEAR = """
import torch
class UnquantizedLinearMethod:
    def apply(self, layer, x, bias=None):
        return torch.nn.functional.linear(x, layer.weight, bias)
class Quantized(UnquantizedLinearMethod):
    pass
"""


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """vLLM's two modules, as far as they are read."""
    layers = load(tmp_path, "base_linear", LAYERS)
    linear = load(tmp_path, "linear", LINEAR)
    monkeypatch.setitem(sys.modules, "vllm.lora.layers.base_linear", layers)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.linear", linear)
    return SimpleNamespace(layers=layers, linear=linear)


def load(folder: Path, name: str, source: str) -> ModuleType:
    file = folder / f"{name}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Counting(PunicaWrapperGPU):
    """Ours, and which of its methods layers called."""

    def __init__(self) -> None:
        super().__init__(16, 4, "cpu", lora_config=Config(MAX_LORAS))
        self.calls: list[str] = []
        self.update_metadata(Mapping((5, 31, 0, 700, 5), (0,)), SLOTS, MAX_LORAS + 1, 100)

    def linear_with_lora(self, *given: object) -> torch.Tensor:  # type: ignore[override]
        self.calls.append("linear_with_lora")
        return super().linear_with_lora(*given)  # type: ignore[arg-type]

    def add_lora_linear(self, *given: object) -> None:  # type: ignore[override]
        self.calls.append("add_lora_linear")
        super().add_lora_linear(*given)  # type: ignore[arg-type]


def test_plain_layers_take_one_operator_and_others_their_own_step(vllm: SimpleNamespace) -> None:
    wrapper = Counting()  # Which takes over: vLLM makes one when its layers are there.
    torch.manual_seed(0)
    a, b = torch.randn(MAX_LORAS, 1, 4, 12), torch.randn(MAX_LORAS, 1, 6, 4)
    x, weight, bias = torch.randn(5, 12), torch.randn(6, 12), torch.randn(6)
    chosen = vllm.linear.UnquantizedLinearMethod()
    chosen._gemm_impl = len
    answers = []
    for method in (vllm.linear.UnquantizedLinearMethod(), vllm.linear.Quantized(), chosen):
        layer = vllm.layers.BaseLinearLayerWithLoRA()
        layer.method, layer.punica_wrapper = method, wrapper
        layer.base_layer = SimpleNamespace(weight=weight)
        layer.lora_a_stacked, layer.lora_b_stacked, layer.output_slices = (a,), (b,), (6,)
        answers += [layer._apply_sync(x, bias), layer._apply_sync(x.view(1, 5, 12), bias).view(5, 6)]
    assert wrapper.calls == ["linear_with_lora", *["add_lora_linear"] * 5]
    for answer in answers:
        torch.testing.assert_close(answer, answers[-1])
    plain = torch.nn.functional.linear(x, weight, bias)
    assert not torch.allclose(answers[0][0], plain[0]) and torch.equal(answers[0][2], plain[2])


def test_another_step_and_no_vllm_are_left_alone(
    vllm: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = load(tmp_path, "changed", LAYERS.replace("x, bias)\n", "x, bias) * 1\n", 1))
    monkeypatch.setitem(sys.modules, "vllm.lora.layers.base_linear", changed)
    stock = changed.BaseLinearLayerWithLoRA._apply_sync
    assert not take_over()
    assert changed.BaseLinearLayerWithLoRA._apply_sync is stock
    monkeypatch.delitem(sys.modules, "vllm.lora.layers.base_linear")
    assert not take_over()
