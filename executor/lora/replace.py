"""Put LoRA on a plain model from outside: the model's code does not know it."""

import logging
import re
from collections.abc import Mapping, Sequence

from torch import nn

from executor.layers import LogitsProcessor
from executor.lora.arena import SlotArena
from executor.lora.config import LoRAConfig
from executor.lora.errors import ModuleNotInModel
from executor.lora.layers import (
    BaseLayerWithLoRA,
    ColumnParallelLinearWithLoRA,
    LogitsProcessorWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
    ReplicatedLinearWithLoRA,
    RowParallelLinearWithLoRA,
    VocabParallelEmbeddingWithLoRA,
)
from executor.lora.layout import SlotLayout
from executor.models import CausalLM
from kernels.punica import PunicaWrapperBase

LAYERS_WITH_LORA: tuple[type[BaseLayerWithLoRA], ...] = (
    ReplicatedLinearWithLoRA,
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    RowParallelLinearWithLoRA,
    VocabParallelEmbeddingWithLoRA,
    LogitsProcessorWithLoRA,
)

logger = logging.getLogger(__name__)


def attach_lora(model: CausalLM, config: LoRAConfig, punica: PunicaWrapperBase) -> SlotArena:
    """Replace the layers behind `config.modules`, in place; returns the arena that holds their weights.

    Call it once, after the checkpoint is loaded. Raises, with the model untouched, ModuleNotInModel for a
    module kind that has no layer, and ValueError when `punica` counts other slots than `config`.
    """
    if punica.max_loras != config.max_loras:
        raise ValueError(f"punica has {punica.max_loras} slots, config.max_loras is {config.max_loras}")
    layers = plan_layers(model, config)
    served = [part for layer in layers.values() for part in layer.served_parts(config, model.config)]
    missing = config.modules - {part.kind for part in served}
    if missing:
        raise ModuleNotInModel(sorted(missing))
    layout = SlotLayout(tuple(part.slot_slice for part in served), config.max_lora_rank, config.dtype)
    arena = SlotArena(layout, config.max_loras, next(model.parameters()).device)
    for path, layer in layers.items():
        layer.create_lora_weights(config.max_loras, config, model.config, arena=arena)
        layer.set_mapping(punica)
        model.set_submodule(path, layer)
        logger.debug("replaced %s by %s", path, type(layer).__name__)
    logger.info(
        "LoRA on %d layers (%d modules: %s), %d slots of %d bytes",
        len(layers),
        len(served),
        ", ".join(sorted(config.modules)),
        config.max_loras,
        arena.nbytes_per_slot,
    )
    return arena


def plan_layers(model: CausalLM, config: LoRAConfig) -> dict[str, BaseLayerWithLoRA]:
    """Path in the model -> the layer to put there, in model order; nothing is replaced yet."""
    planned = {}
    for path, source in model.named_modules():
        names = _module_names(path, source, model.packed_modules_mapping)
        if not config.modules.isdisjoint(name.rpartition(".")[2] for name in names):
            layer_class = _class_for(source, config, names, model)
            if layer_class is not None:
                planned[path] = layer_class(source, names)
    return planned


def _class_for(
    source: nn.Module, config: LoRAConfig, names: Sequence[str], model: CausalLM
) -> type[BaseLayerWithLoRA] | None:
    fitting = (c for c in LAYERS_WITH_LORA if c.can_replace_layer(source, config, names, model.config))
    return next(fitting, None)


def _module_names(path: str, source: nn.Module, packed: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Packed-form names: model.layers.3.mlp.gate_up_proj -> layers.3.gate_proj, layers.3.up_proj."""
    if isinstance(source, LogitsProcessor):
        return ("lm_head",)
    leaf = path.rpartition(".")[2]
    layer = re.search(r"(?:^|\.)(layers\.\d+\.)", path)
    return tuple((layer[1] if layer else "") + member for member in packed.get(leaf, (leaf,)))
