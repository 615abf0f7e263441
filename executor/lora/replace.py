"""Puts LoRA on a plain model from outside: the model's code does not know it."""

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from adapter_store import kind_of
from adapter_store.module_names import DENSE_PROJECTIONS
from executor.layers import LogitsProcessor, ParallelLMHead
from executor.layers.fused_moe import FusedMoE
from executor.layers.model_config import ModelConfig, MoEConfig
from executor.lora import layers as lora
from executor.lora.arena import SlotArena
from executor.lora.config import LoRAConfig
from executor.lora.errors import LayerRefused, ModuleNotInModel, Refusal
from executor.lora.layers import BaseLayerWithLoRA
from executor.lora.layout import SlotLayout
from executor.models import CausalLM
from kernels.punica import PunicaWrapperBase

LAYERS_WITH_LORA: tuple[type[BaseLayerWithLoRA], ...] = (
    lora.ReplicatedLinearWithLoRA,
    lora.ColumnParallelLinearWithLoRA,
    lora.ColumnParallelLinearWithShardedLoRA,
    lora.MergedColumnParallelLinearWithLoRA,
    lora.MergedColumnParallelLinearWithShardedLoRA,
    lora.MergedColumnParallelLinearVariableSliceWithLoRA,
    lora.MergedColumnParallelLinearVariableSliceWithShardedLoRA,
    lora.QKVParallelLinearWithLoRA,
    lora.QKVParallelLinearWithShardedLoRA,
    lora.MergedQKVParallelLinearWithLoRA,
    lora.MergedQKVParallelLinearWithShardedLoRA,
    lora.RowParallelLinearWithLoRA,
    lora.RowParallelLinearWithShardedLoRA,
    lora.FusedMoEWithLoRA,
    lora.FusedMoEWithShardedLoRA,
    lora.FusedMoE3DWithLoRA,
    lora.FusedMoE3DWithShardedLoRA,
    lora.VocabParallelEmbeddingWithLoRA,
    lora.LogitsProcessorWithLoRA,
)
_REPLACEABLE = {source for layer_class in LAYERS_WITH_LORA for source in layer_class.source_types}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttachedLoRA:
    """`replaced`: path in the model -> the layer that stands there now, in model order."""

    arena: SlotArena
    replaced: Mapping[str, BaseLayerWithLoRA]

    def __str__(self) -> str:
        """Classes with how often each was put, slots and sizes."""
        counts = Counter(type(layer).__name__ for layer in self.replaced.values())
        classes = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        return f"{classes}; {self.arena.max_loras} slots of {self.arena.nbytes_per_slot} bytes"


def attach_lora(model: CausalLM, config: LoRAConfig, punica: PunicaWrapperBase) -> AttachedLoRA:
    """Replace the layers behind `config.modules`, in place, on this rank; the arena holds their weights.

    Call it once, after the checkpoint is loaded. Raises, with the model untouched, LayerRefused and
    ModuleNotInModel for module kinds that have no layer, and ValueError when `punica` counts other slots than
    `config`.
    """
    if punica.max_loras != config.max_loras:
        raise ValueError(f"punica has {punica.max_loras} slots, config.max_loras is {config.max_loras}")
    layers = plan_layers(model, config)
    layout = slot_layout(model, config, layers)
    arena = SlotArena(layout, config.max_loras, next(model.parameters()).device)
    for path, layer in layers.items():
        layer.create_lora_weights(config.max_loras, config, model.config, arena=arena)
        layer.set_mapping(punica)
        model.set_submodule(path, layer)
    attached = AttachedLoRA(arena, layers)
    logger.info("LoRA for %s: %s", ", ".join(sorted(config.modules)), attached)
    return attached


def slot_layout(model: CausalLM, config: LoRAConfig, layers: Mapping[str, BaseLayerWithLoRA]) -> SlotLayout:
    """The layout of one slot for the planned layers. Raises ModuleNotInModel."""
    served = [part for layer in layers.values() for part in layer.served_parts(config, model.config)]
    missing = config.modules - {part.kind for part in served}
    # The default names what dense models have: a model whose MLPs are experts is served with the rest.
    if missing and not (served and config.modules == frozenset(DENSE_PROJECTIONS)):
        raise ModuleNotInModel(sorted(missing))
    return SlotLayout.on_rank([part.slot_slice for part in served], config, model.group)


def plan_layers(model: CausalLM, config: LoRAConfig) -> dict[str, BaseLayerWithLoRA]:
    """Path in the model -> the layer to put there, in model order; nothing is replaced yet. LayerRefused."""
    planned = {}
    for path, source in model.named_modules():
        names = _module_names(path, source, model.packed_modules_mapping)
        if not config.modules.isdisjoint(map(kind_of, names)):
            planned[path] = class_for(source, config, names, model.config)(source, names)
    return planned


def class_for(
    source: nn.Module, config: LoRAConfig, names: Sequence[str], model_config: ModelConfig | None = None
) -> type[BaseLayerWithLoRA]:
    """The one class that can stand for `source` with these modules behind it. Raises LayerRefused."""
    fitting = [c for c in LAYERS_WITH_LORA if c.can_replace_layer(source, config, names, model_config)]
    if len(fitting) > 1:
        raise RuntimeError(f"{[c.__name__ for c in fitting]} all stand for {type(source).__name__}")
    if not fitting:
        raise LayerRefused(type(source).__name__, names, _refusal(source, config, names))
    return fitting[0]


def _refusal(source: nn.Module, config: LoRAConfig, names: Sequence[str]) -> Refusal:
    if type(source) not in _REPLACEABLE:
        return Refusal.LAYER_TYPE
    if isinstance(source, FusedMoE) and source.config.expert_parallel and config.fully_sharded_loras:
        return Refusal.EXPERT_PARALLEL
    counts = any(c.can_replace_layer(source, config, names, decorate=False) for c in LAYERS_WITH_LORA)
    return Refusal.OUTPUT_SIZE if counts and config.fully_sharded_loras else Refusal.MODULE_COUNT


def _module_names(path: str, source: nn.Module, packed: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Packed-form names: model.layers.3.mlp.gate_up_proj -> layers.3.gate_proj, layers.3.up_proj."""
    if isinstance(source, LogitsProcessor):
        return ("lm_head",)
    if isinstance(source, ParallelLMHead):
        return ()  # its LoRA acts on the logits
    leaf = path.rpartition(".")[2]
    layer = re.search(r"(?:^|\.)(layers\.\d+\.)(?:mlp\.(shared_expert\.))?", path)
    prefix = "".join(part for part in layer.groups() if part) if layer else ""
    return tuple(prefix + member for member in _members(leaf, source, packed))


def _members(leaf: str, source: nn.Module, packed: Mapping[str, Sequence[str]]) -> Sequence[str]:
    if isinstance(source, FusedMoE):
        return [f"{leaf}.{matrix}" for matrix in _expert_matrices(source.config)]
    return packed.get(leaf, (leaf,))


def _expert_matrices(config: MoEConfig) -> tuple[str, ...]:
    if config.interleaved:
        return "w13", "w2"
    return ("w1", "w2", "w3") if config.gated else ("w1", "w2")
