"""One operator for what vLLM's linear layers do in two: their product, then the wrapper's call.

A call behind the product waits for it, though LoRA needs x alone. Inside one operator it runs beside the
product or before it, whatever a compiler does around it. It stands in for exactly the step written here, of
layers whose weights are not quantized; other layers, and other versions of vLLM, keep their own step.
"""

import ast
import inspect
import sys
import textwrap
from typing import Any

from torch import Tensor

_STEP = """
def _apply_sync(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    output = self._get_quant_method().apply(self.base_layer, x, bias)
    return self._apply_lora_to_output(x, output)
"""


def take_over() -> bool:
    """Let vLLM's BaseLinearLayerWithLoRA call `linear_with_lora` of a wrapper that has it. Whether it does:
    not where vLLM is not there, or its step is another."""
    layers = sys.modules.get("vllm.lora.layers.base_linear")
    linear = sys.modules.get("vllm.model_executor.layers.linear")
    if layers is None or linear is None:
        return False
    layer, unquantized = layers.BaseLinearLayerWithLoRA, linear.UnquantizedLinearMethod
    stock = layer._apply_sync
    if hasattr(stock, "lorafleet"):
        return True
    if _tree(inspect.getsource(stock)) != _tree(_STEP):
        return False

    def _apply_sync(self: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        whole = getattr(self.punica_wrapper, "linear_with_lora", None)
        if whole is None or x.ndim != 2 or not _is_plain(self._get_quant_method(), unquantized):
            return stock(self, x, bias)  # type: ignore[no-any-return]
        weight, slices = self.base_layer.weight, self.output_slices
        output: Tensor = whole(x, weight, bias, self.lora_a_stacked, self.lora_b_stacked, slices)
        return output

    _apply_sync.lorafleet = True  # type: ignore[attr-defined]
    layer._apply_sync = _apply_sync
    return True


def _is_plain(method: Any, unquantized: type) -> bool:
    """Whether a layer's product is x @ W.T + bias by torch: 0.33 lets users choose another form of it."""
    chosen = getattr(method, "_gemm_impl", None)
    return type(method) is unquantized and (
        chosen is None or getattr(chosen, "__name__", "") == "default_unquantized_gemm"
    )


def _tree(source: str) -> str:
    return ast.dump(ast.parse(textwrap.dedent(source)))
