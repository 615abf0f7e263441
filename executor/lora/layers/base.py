"""What every layer with LoRA does: declare its parts, view its stacked weights, take and drop an adapter."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from executor.layers import LinearBase
from executor.lora.arena import SlotArena, StackedWeights
from executor.lora.config import LoRAConfig
from executor.lora.errors import ModuleNotServed, ModuleShapeMismatch, RankTooLarge
from executor.lora.layout import SlotLayout, SlotSlice
from executor.model_config import ModelConfig
from kernels.punica import PunicaWrapperBase

# One tensor for a layer of one part; one a part for a packed layer, None where the adapter has none.
Factors = Tensor | Sequence[Tensor | None]


@dataclass(frozen=True, slots=True)
class LayerPart:
    """One module of a layer: its factors' sizes and its first column in the layer's output."""

    module: str
    in_features: int
    out_features: int
    column_start: int = 0

    @property
    def kind(self) -> str:
        return self.module.rpartition(".")[2]

    @property
    def slot_slice(self) -> SlotSlice:
        return SlotSlice(self.module, self.in_features, self.out_features)


class BaseLayerWithLoRA(nn.Module, ABC):
    """Wraps one base layer from outside.

    Life: construct, `create_lora_weights`, `set_mapping`, then forward. `module_names` are the modules behind
    this layer, in packed order: ("layers.0.q_proj", "layers.0.k_proj", "layers.0.v_proj") for qkv.
    """

    source_types: ClassVar[tuple[type[nn.Module], ...]]
    # One module a stacked part of the base layer, instead of one over its whole output.
    one_module_per_part: ClassVar[bool] = False

    punica_wrapper: PunicaWrapperBase
    stacked: StackedWeights

    def __init__(self, base_layer: nn.Module, module_names: Sequence[str]) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.module_names = tuple(module_names)
        self.served: tuple[LayerPart, ...] = ()

    @abstractmethod
    def parts(self, model_config: ModelConfig | None = None) -> tuple[LayerPart, ...]:
        """All parts in packed order, one a module name."""

    @classmethod
    def can_replace_layer(
        cls,
        source_layer: nn.Module,
        lora_config: LoRAConfig,
        packed_modules_list: Sequence[str],
        model_config: ModelConfig | None = None,
    ) -> bool:
        """Whether this class fits a base layer behind which the modules of `packed_modules_list` lie.

        The type must be exact (a subclass may compute something else), and so must the number of modules.
        """
        if type(source_layer) not in cls.source_types:
            return False
        if cls.one_module_per_part and isinstance(source_layer, LinearBase):
            return 1 < len(packed_modules_list) == len(source_layer.output_sizes)
        return len(packed_modules_list) == 1

    def served_parts(
        self, lora_config: LoRAConfig, model_config: ModelConfig | None = None
    ) -> tuple[LayerPart, ...]:
        """The parts whose kind `lora_config` names: only these take room in a slot."""
        return tuple(part for part in self.parts(model_config) if part.kind in lora_config.modules)

    def create_lora_weights(
        self,
        max_loras: int,
        lora_config: LoRAConfig,
        model_config: ModelConfig | None = None,
        *,
        arena: SlotArena | None = None,
    ) -> None:
        """Take views of `arena`, in whose layout this layer's served parts are neighbours; without one, of
        an arena for this layer alone. ValueError when no part is served or the arena has other slots."""
        self.served = self.served_parts(lora_config, model_config)
        if not self.served:
            raise ValueError(f"none of {', '.join(self.module_names)} is served")
        if arena is None:
            slices = tuple(part.slot_slice for part in self.served)
            layout = SlotLayout(slices, lora_config.max_lora_rank, lora_config.dtype)
            arena = SlotArena(layout, max_loras, self.weight_device())
        if arena.max_loras != max_loras:
            raise ValueError(f"the arena has {arena.max_loras} slots, max_loras is {max_loras}")
        self.stacked = arena.stacked([part.module for part in self.served])

    def weight_device(self) -> torch.device:
        return next((p.device for p in self.base_layer.parameters()), torch.device("cpu"))

    @property
    def lora_a_stacked(self) -> tuple[Tensor, ...]:
        """[max_loras, max_rank, in], one a served part."""
        return self.stacked.lora_a

    @property
    def lora_b_stacked(self) -> tuple[Tensor, ...]:
        """[max_loras, out, max_rank], one a served part; in memory the rank is the outer axis."""
        return tuple(weight.transpose(1, 2) for weight in self.stacked.lora_b)

    def set_mapping(self, punica_wrapper: PunicaWrapperBase) -> None:
        self.punica_wrapper = punica_wrapper

    def set_lora(
        self, index: int, lora_a: Factors, lora_b: Factors, scaling: float | Sequence[float] = 1.0
    ) -> None:
        """Put one adapter's factors into slot `index`; whatever was there is gone, also parts not given now.

        lora_a [r, in] and lora_b [out, r] as trained; a packed layer takes one a part, None for a part that
        the adapter lacks. `scaling` is one value or one a part. All is checked before the slot changes:
        ValueError, ModuleNotServed, RankTooLarge, ModuleShapeMismatch.
        """
        chosen = self._checked_factors(self.slice_lora_a(lora_a), self.slice_lora_b(lora_b))
        scales = [scaling] * len(self.module_names) if isinstance(scaling, float | int) else list(scaling)
        if len(scales) != len(self.module_names):
            raise ValueError(f"scaling has {len(scales)} values for {len(self.module_names)} parts")
        self.reset_lora(index)
        by_name = dict(zip(self.module_names, scales, strict=True))
        for number, part in enumerate(self.served):
            if part.module in chosen:
                a, b = chosen[part.module]
                rank = a.shape[0]
                self.stacked.lora_a[number][index, :rank].copy_(a)
                self.stacked.lora_b[number][index, :rank].copy_(b.T)
                self.stacked.scales[number, index] = by_name[part.module]
                self.stacked.ranks[number, index] = rank

    def reset_lora(self, index: int) -> None:
        """Empty slot `index` for this layer: rank 0 hides its weights. ValueError when it is out of range."""
        if not 0 <= index < self.stacked.ranks.shape[1]:
            raise ValueError(f"index {index} is outside [0, {self.stacked.ranks.shape[1]})")
        self.stacked.ranks[:, index] = 0
        self.stacked.scales[:, index] = 0.0

    def slice_lora_a(self, lora_a: Factors) -> Factors:
        """This device's share of A: with one device, all of it."""
        return lora_a

    def slice_lora_b(self, lora_b: Factors) -> Factors:
        """This device's share of B: with one device, all of it."""
        return lora_b

    def _checked_factors(self, lora_a: Factors, lora_b: Factors) -> dict[str, tuple[Tensor, Tensor]]:
        lefts, rights = _one_a_part(lora_a), _one_a_part(lora_b)
        if not len(lefts) == len(rights) == len(self.module_names):
            raise ValueError(
                f"lora_a has {len(lefts)} and lora_b {len(rights)} tensors for {len(self.module_names)} parts"
            )
        served = {part.module: part for part in self.served}
        chosen = {}
        for module, a, b in zip(self.module_names, lefts, rights, strict=True):
            if a is None and b is None:
                continue
            if a is None or b is None:
                raise ValueError(f"module {module} has only one of lora_a and lora_b")
            if module not in served:
                raise ModuleNotServed(module)
            _check_shapes(served[module], a, b, self.stacked.lora_a[0].shape[1])
            chosen[module] = a, b
        return chosen


def _one_a_part(factors: Factors) -> list[Tensor | None]:
    return [factors] if isinstance(factors, Tensor) else list(factors)


def _check_shapes(part: LayerPart, a: Tensor, b: Tensor, max_rank: int) -> None:
    rank = a.shape[0]
    if rank > max_rank:
        raise RankTooLarge(part.module, rank, max_rank)
    if a.shape != (rank, part.in_features):
        raise ModuleShapeMismatch(f"{part.module}.lora_a", tuple(a.shape), (rank, part.in_features))
    if b.shape != (part.out_features, rank):
        raise ModuleShapeMismatch(f"{part.module}.lora_b", tuple(b.shape), (part.out_features, rank))
