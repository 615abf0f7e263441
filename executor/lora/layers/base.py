"""What every layer with LoRA does: declares its parts, views its weights, takes and drops adapters."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapter_store import kind_of
from executor.distributed import ParallelGroup
from executor.layers.model_config import ModelConfig
from executor.lora.arena import SlotArena, StackedWeights
from executor.lora.config import LoRAConfig
from executor.lora.cut import Cut
from executor.lora.errors import ModuleNotServed, ModuleShapeMismatch, RankTooLarge
from executor.lora.layout import SlotLayout, SlotSlice
from executor.lora.output_factors import OutputFactors
from executor.lora.quantize import FP8_DTYPES, quantize
from kernels.metadata.meta import LoRAKernelMeta
from kernels.punica import PunicaWrapperBase

# One tensor for a layer of one part; one a part for a packed layer, None where the adapter has none.
Factors = Tensor | Sequence[Tensor | None]


@dataclass(frozen=True, slots=True)
class LayerPart:
    """One module of a layer: its place in a slot, and where it begins in this rank's output."""

    slot_slice: SlotSlice
    column_start: int = 0

    @property
    def module(self) -> str:
        return self.slot_slice.module

    @property
    def kind(self) -> str:
        return kind_of(self.module)

    @property
    def cut(self) -> Cut:
        return self.slot_slice.cut


class BaseLayerWithLoRA(nn.Module, ABC):
    """Wraps one base layer from outside.

    Life: construct, `create_lora_weights`, `set_mapping`, then forward. `module_names` are the modules behind
    this layer, in packed order: ("layers.0.q_proj", "layers.0.k_proj", "layers.0.v_proj") for qkv.
    """

    source_types: ClassVar[tuple[type[nn.Module], ...]]
    # Of a pair of classes, the one for `fully_sharded_loras`; None: this class serves both.
    fully_sharded: ClassVar[bool | None] = None

    group: ParallelGroup
    punica_wrapper: PunicaWrapperBase
    stacked: StackedWeights
    output_factors: OutputFactors | None = None  # set from outside where DoRA is served

    def __init__(self, base_layer: nn.Module, module_names: Sequence[str]) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.group = _group_of(base_layer)
        self.module_names = tuple(module_names)
        self.all_parts: tuple[LayerPart, ...] = ()
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
        decorate: bool = True,
    ) -> bool:
        """Whether this class fits a base layer behind which the modules of `packed_modules_list` lie.

        The type must be exact (a subclass may compute something else), and so must the number of modules.
        With one rank nothing is cut, so that `fully_sharded_loras` changes nothing there. Without `decorate`
        it changes nothing anywhere: the answer is of the layer and its modules alone.
        """
        if type(source_layer) not in cls.source_types or not cls.fits(source_layer, len(packed_modules_list)):
            return False
        if not decorate:
            return True
        sharded = lora_config.fully_sharded_loras and _group_of(source_layer).size > 1
        return cls.fully_sharded in (None, sharded)

    @classmethod
    def fits(cls, source_layer: nn.Module, modules: int) -> bool:
        """Whether this class can put so many modules on a layer of its `source_types`."""
        return modules == 1

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
        self.all_parts = self.parts(model_config)
        self.served = self.served_parts(lora_config, model_config)
        if not self.served:
            raise ValueError(f"none of {', '.join(self.module_names)} is served")
        if arena is None:
            slices = [part.slot_slice for part in self.served]
            layout = SlotLayout.on_rank(slices, lora_config, self.group)
            arena = SlotArena(layout, max_loras, self.weight_device())
        if arena.max_loras != max_loras:
            raise ValueError(f"the arena has {arena.max_loras} slots, max_loras is {max_loras}")
        self.stacked = arena.stacked([part.module for part in self.served])

    def weight_device(self) -> torch.device:
        return next((p.device for p in self.base_layer.parameters()), torch.device("cpu"))

    @property
    def lora_a_stacked(self) -> tuple[Tensor, ...]:
        """[max_loras, max_rank, in], one a served part; of this rank, as all stacked weights."""
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

        lora_a [r, in] and lora_b [out, r] as trained, whole on every rank; a packed layer takes one a part,
        None for a part that the adapter lacks. `scaling` is one value or one a part. All is checked before
        the slot changes: ValueError, ModuleNotServed, RankTooLarge, ModuleShapeMismatch.
        """
        lefts, rights = self._checked_factors(lora_a, lora_b)
        scales = [scaling] * len(self.module_names) if isinstance(scaling, float | int) else list(scaling)
        if len(scales) != len(self.module_names):
            raise ValueError(f"scaling has {len(scales)} values for {len(self.module_names)} parts")
        self.reset_lora(index)
        numbers = {part.module: number for number, part in enumerate(self.served)}
        cut_lefts, cut_rights = self.slice_lora_a(lefts), self.slice_lora_b(rights)
        for module, whole, a, b, scale in zip(
            self.module_names, lefts, cut_lefts, cut_rights, scales, strict=True
        ):
            if whole is not None and a is not None and b is not None:
                self._write(numbers[module], index, whole.shape[0], a, b, scale)

    def _write(self, number: int, index: int, rank: int, a: Tensor, b: Tensor, scale: float) -> None:
        stacked = self.stacked
        if stacked.lora_a[number].dtype in FP8_DTYPES:
            (a, left), (b, right) = (quantize(half, stacked.lora_a[number].dtype) for half in (a, b))
            scale *= left * right
        stacked.lora_a[number][index, : len(a)].copy_(a)
        stacked.lora_b[number][index, :rank].copy_(b.T)
        stacked.scales[number, index] = scale
        stacked.ranks[number, index] = rank
        stacked.shrink_ranks[number, index] = len(a)

    def scale_outputs(self, y: Tensor, meta: LoRAKernelMeta, bias: Tensor | None = None) -> None:
        """DoRA's last part, on the sum of base and delta; `bias` is in it, and stays as it is."""
        factors = self.output_factors
        if factors is not None and factors.marks.concern(meta):
            self.punica_wrapper.scale_outputs(y, factors.table, factors.marks.on_device, bias, meta)

    def reset_lora(self, index: int) -> None:
        """Empty slot `index` for this layer: rank 0 hides its weights. ValueError when it is out of range."""
        if not 0 <= index < self.stacked.ranks.shape[1]:
            raise ValueError(f"index {index} is outside [0, {self.stacked.ranks.shape[1]})")
        self.stacked.ranks[:, index] = 0
        self.stacked.shrink_ranks[:, index] = 0
        self.stacked.scales[:, index] = 0.0

    @overload
    def slice_lora_a(self, lora_a: Tensor) -> Tensor: ...
    @overload
    def slice_lora_a(self, lora_a: Sequence[Tensor | None]) -> list[Tensor | None]: ...
    def slice_lora_a(self, lora_a: Factors) -> Tensor | list[Tensor | None]:
        """This rank's share of A [r, in]: its columns, and its ceil(r / shards) rows.

        One tensor a module gives a list; the tensor of a layer with one module gives a tensor, and a
        ValueError in a layer with several.
        """
        if isinstance(lora_a, Tensor):
            return self.own_a(self._only_part(), lora_a)
        return [
            None if a is None else self.own_a(part, a) for part, a in zip(self.all_parts, lora_a, strict=True)
        ]

    @overload
    def slice_lora_b(self, lora_b: Tensor) -> Tensor: ...
    @overload
    def slice_lora_b(self, lora_b: Sequence[Tensor | None]) -> list[Tensor | None]: ...
    def slice_lora_b(self, lora_b: Factors) -> Tensor | list[Tensor | None]:
        """This rank's share of B [out, r]: its rows, as they lie in its output. Forms as `slice_lora_a`'s."""
        if isinstance(lora_b, Tensor):
            return self.own_b(self._only_part(), lora_b)
        return [
            None if b is None else self.own_b(part, b) for part, b in zip(self.all_parts, lora_b, strict=True)
        ]

    def own_a(self, part: LayerPart, a: Tensor) -> Tensor:
        return padded(part.cut.of_a(a), part.cut.a_rows(len(a)))

    def own_b(self, part: LayerPart, b: Tensor) -> Tensor:
        return torch.cat(part.cut.of_b(b.T), dim=1).T

    def _only_part(self) -> LayerPart:
        if len(self.all_parts) != 1:
            raise ValueError(f"one tensor for {len(self.all_parts)} parts: give a list with one a part")
        return self.all_parts[0]

    def one_a_module(
        self, lora_a: Factors, lora_b: Factors
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The factors as lists, one entry a module name."""
        return _listed(lora_a), _listed(lora_b)

    def _checked_factors(
        self, lora_a: Factors, lora_b: Factors
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        lefts, rights = self.one_a_module(lora_a, lora_b)
        if not len(lefts) == len(rights) == len(self.module_names):
            raise ValueError(
                f"lora_a has {len(lefts)} and lora_b {len(rights)} tensors for {len(self.module_names)} parts"
            )
        for part, a, b in zip(self.all_parts, lefts, rights, strict=True):
            if a is None and b is None:
                continue
            if a is None or b is None:
                raise ValueError(f"module {part.module} has only one of lora_a and lora_b")
            if part not in self.served:
                raise ModuleNotServed(part.module)
            self.check_shapes(part.slot_slice, a, b)
        return lefts, rights

    def check_shapes(self, whole: SlotSlice, a: Tensor, b: Tensor) -> None:
        """Raises RankTooLarge, ModuleShapeMismatch."""
        _check_shapes(whole, a, b, self.stacked.lora_b[0].shape[1])


def _group_of(base_layer: nn.Module) -> ParallelGroup:
    return cast(ParallelGroup, base_layer.group)


def _listed(factors: Factors) -> list[Tensor | None]:
    return [factors] if isinstance(factors, Tensor) else list(factors)


def padded(a: Tensor, rows: int) -> Tensor:
    """A rank's share of A, up to `rows` rows: zeros where too few were dealt."""
    return F.pad(a, (0, 0, 0, rows - len(a)))


def _check_shapes(whole: SlotSlice, a: Tensor, b: Tensor, max_rank: int) -> None:
    rank = a.shape[0]
    if rank > max_rank:
        raise RankTooLarge(whole.module, rank, max_rank)
    if a.shape != (rank, whole.in_features):
        raise ModuleShapeMismatch(f"{whole.module}.lora_a", tuple(a.shape), (rank, whole.in_features))
    if b.shape != (whole.out_features, rank):
        raise ModuleShapeMismatch(f"{whole.module}.lora_b", tuple(b.shape), (whole.out_features, rank))
