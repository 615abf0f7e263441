"""Errors of the LoRA side, a branch of the executor's tree.

ExecutorError
└── LoRAError
    ├── ModuleNotServed        the adapter has a module that no slot of this executor holds
    ├── RankTooLarge           a module's rank is above what a slot holds
    ├── DoRANotServed          the adapter has magnitudes, and several ranks apply none
    ├── FullHeadNotServed      the adapter has more fully trained heads than this executor has places for
    ├── ModuleShapeMismatch    a tensor does not have the base layer's shape
    ├── NonFiniteWeights       a tensor is not finite in the slots' dtype
    ├── ModuleNotInModel       LoRAConfig names a module kind that the model has no replaceable layer for
    └── LayerRefused           no class with LoRA can stand for a layer; says which rule it breaks
"""

from collections.abc import Sequence
from enum import Enum

from executor.errors import ExecutorError


class LoRAError(ExecutorError):
    """Root of what the LoRA side raises on purpose."""


class ModuleNotServed(LoRAError):
    def __init__(self, module: str) -> None:
        super().__init__(f"module {module} is not served here; name its kind in --lora-modules")
        self.module = module


class RankTooLarge(LoRAError):
    def __init__(self, module: str, rank: int, max_rank: int) -> None:
        super().__init__(f"module {module} has rank {rank}, slots hold at most {max_rank} (--max-lora-rank)")
        self.module, self.rank, self.max_rank = module, rank, max_rank


class DoRANotServed(LoRAError):
    def __init__(self, module: str) -> None:
        super().__init__(f"module {module} is DoRA (use_dora), which one rank serves, not several")
        self.module = module


class FullHeadNotServed(LoRAError):
    def __init__(self, modules: Sequence[str], places: int) -> None:
        super().__init__(
            f"the adapter brings its own {' and '.join(modules)} (modules_to_save), this executor has places "
            f"for {places} such matrices (--max-full-heads)"
        )
        self.modules, self.places = tuple(modules), places


class ModuleShapeMismatch(LoRAError):
    def __init__(self, tensor: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        super().__init__(f"tensor {tensor} has shape {list(shape)}, the base layer needs {list(expected)}")
        self.tensor, self.shape, self.expected = tensor, shape, expected


class NonFiniteWeights(LoRAError):
    def __init__(self, tensor: str, source: str, target: str) -> None:
        super().__init__(f"tensor {tensor} ({source}) has a value that is not finite as {target}")
        self.tensor, self.source, self.target = tensor, source, target


class ModuleNotInModel(LoRAError):
    def __init__(self, kinds: list[str]) -> None:
        super().__init__(f"the model has no layer to put LoRA on for: {', '.join(kinds)} (--lora-modules)")
        self.kinds = kinds


class Refusal(Enum):
    LAYER_TYPE = "there is no class with LoRA for this type of layer"
    MODULE_COUNT = "so many modules do not match the parts of the layer"
    EXPERT_PARALLEL = "--fully-sharded-loras does not go together with --expert-parallel"
    OUTPUT_SIZE = "the ranks do not divide its output, as --fully-sharded-loras needs"


class LayerRefused(LoRAError):
    def __init__(self, layer: str, modules: Sequence[str], refusal: Refusal) -> None:
        super().__init__(f"no LoRA for {layer} with modules {', '.join(modules)}: {refusal.value}")
        self.layer, self.modules, self.refusal = layer, tuple(modules), refusal
