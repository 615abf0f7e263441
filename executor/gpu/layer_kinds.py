"""Which layers of a model launch the same kernels: to compile all, one of each kind is enough."""

from collections.abc import Hashable

from torch import nn

from executor.lora.layers import BaseLayerWithLoRA
from executor.models import CausalLM
from kernels.launching.launch import signature


def layer_kinds(model: CausalLM) -> tuple[int, ...]:
    """The first of each kind, ascending; call it when the model has its slots.

    Layers are alike that have the same modules, window of attention, and shapes, strides, types and
    alignments of all their tensors, which are what kernels are compiled for. (Tables of ranks are rows of
    one for all layers: with two slots every second layer's begins in the middle of 16 bytes.)
    """
    kinds: dict[Hashable, int] = {}
    for number, (layer, window) in enumerate(zip(model.model.layers, model.config.windows, strict=True)):
        kinds.setdefault((window, *map(_form, layer.modules())), number)
    return tuple(kinds.values())


def _form(module: nn.Module) -> Hashable:
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if isinstance(module, BaseLayerWithLoRA):
        stacked = module.stacked
        tensors += [*stacked.lora_a, *stacked.lora_b, stacked.ranks, stacked.scales, stacked.shrink_ranks]
        if module.output_factors:
            tensors.append(module.output_factors.table)
    return type(module), signature(*tensors)
