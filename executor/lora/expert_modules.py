"""An adapter's expert modules in the form that a slot has for them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from adapter_store import LoRAModule, is_expert
from executor.lora.layout import SlotLayout

_Array = npt.NDArray[Any]


def as_layout_has_them(weights: Mapping[str, LoRAModule], layout: SlotLayout) -> dict[str, LoRAModule]:
    """One pair for gate and up (w13) as two with the same A (w1, w3), where the slot keeps them apart."""
    modules: dict[str, LoRAModule] = {}
    for name, module in weights.items():
        prefix = name.removesuffix(".w13")
        if is_expert(name) and prefix != name and name not in layout.index:
            gate, up = np.split(module.lora_b, 2, axis=-1)
            modules[f"{prefix}.w1"] = replace(module, name=f"{prefix}.w1", lora_b=gate)
            modules[f"{prefix}.w3"] = replace(module, name=f"{prefix}.w3", lora_b=up)
        else:
            modules[name] = module
    return modules


def rank_first(array: _Array) -> _Array:
    """[experts, rank, width] -> [rank, experts, width], a view; a plain [rank, width] stays as it is."""
    return array if array.ndim == 2 else array.swapaxes(0, 1)
