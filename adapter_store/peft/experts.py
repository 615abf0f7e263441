"""LoRA on experts, in the forms that PEFT wrote over time: which tensors of a file are which module."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from adapter_store.errors import IncompatibleAdapter, InvalidAdapter
from adapter_store.files.safetensors_file import TensorFile, TensorInfo
from adapter_store.manifest import ModuleInfo
from adapter_store.moe_spec import MoESpec
from adapter_store.peft.config import CONFIG_FILE, LoraSettings
from adapter_store.peft.expert_pair import ExpertPair
from adapter_store.peft.fused_experts import from_fused, is_swapped
from adapter_store.peft.keys import PREFIX
from adapter_store.peft.single_experts import from_single
from adapter_store.peft.stacked import StackedPair

# Over a parameter of all experts, where PEFT nests the second parameter's pair around the first one's
# (base_layer); or of one expert's matrix.
_KEY = re.compile(
    PREFIX + r"layers\.(?P<layer>0|[1-9][0-9]{0,5})\.(?P<parent>mlp|block_sparse_moe)\.experts\."
    r"(?:(?P<inner>base_layer)\.|(?P<expert>0|[1-9][0-9]{0,5})\.(?P<leaf>[a-z0-9_]+)\.)?"
    r"lora_(?P<half>[AB])(?:\.default)?\.weight"
)
_MATRICES = {
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
    **{matrix: matrix for matrix in ("w1", "w2", "w3")},
}


@dataclass(frozen=True)
class Experts:
    modules: tuple[ModuleInfo, ...] = ()
    pairs: Mapping[str, StackedPair] = field(default_factory=dict)  # by module name
    tensors: frozenset[str] = frozenset()  # of the file, that these modules are made of


@dataclass
class _Found:
    fused: dict[tuple[int, bool], ExpertPair] = field(default_factory=dict)  # by layer, and whether inner
    single: dict[str, dict[int, ExpertPair]] = field(default_factory=dict)  # by module name and expert


def read_experts(file: TensorFile, settings: LoraSettings, moe: MoESpec | None) -> Experts:
    """Raises InvalidAdapter or IncompatibleAdapter, naming the tensor. Nothing where the base has none."""
    if moe is None:
        return Experts()
    found = _sort(file, settings, moe)
    if settings.use_dora and (found.fused or found.single):
        raise InvalidAdapter(f"{CONFIG_FILE}: use_dora is true, which is not served on experts")
    stacks: dict[str, tuple[ModuleInfo, StackedPair]] = {}
    swapped = is_swapped(found.fused.values(), settings, moe)
    for pair in found.fused.values():
        _add(stacks, *from_fused(pair, swapped, settings, moe))
    for name, pairs in found.single.items():
        _add(stacks, *from_single(name, pairs, settings, moe))
    return Experts(
        tuple(module for module, _ in stacks.values()),
        {name: stack for name, (_, stack) in stacks.items()},
        frozenset(tensor.name for _, stack in stacks.values() for tensor in stack.tensors),
    )


def _sort(file: TensorFile, settings: LoraSettings, moe: MoESpec) -> _Found:
    found = _Found()
    for tensor in file:
        if match := _KEY.fullmatch(tensor.name):
            layer = int(match["layer"])
            _check_layer(tensor, layer, settings, moe)
            pair = _pair_of(match, tensor, layer, found, moe)
            pair.put("a" if match["half"] == "A" else "b", tensor)
    for pair in found.fused.values():
        pair.check()
    for pairs in found.single.values():
        for pair in pairs.values():
            pair.check()
    _check_nesting(found.fused)
    return found


def _pair_of(match: re.Match[str], tensor: TensorInfo, layer: int, found: _Found, moe: MoESpec) -> ExpertPair:
    path = f"model.layers.{layer}.{match['parent']}.experts"
    if match["expert"] is None:
        key = layer, match["inner"] is not None
        return found.fused.setdefault(key, ExpertPair(layer, path))
    expert, leaf = int(match["expert"]), match["leaf"]
    if leaf not in _MATRICES or moe.fused:
        raise InvalidAdapter(f"tensor {tensor.name!r} matches no module of the base model")
    if expert >= moe.num_experts:
        raise IncompatibleAdapter(f"tensor {tensor.name!r}: the base has {moe.num_experts} experts")
    pairs = found.single.setdefault(f"layers.{layer}.experts.{_MATRICES[leaf]}", {})
    return pairs.setdefault(expert, ExpertPair(layer, f"{path}.{expert}.{leaf}"))


def _check_layer(tensor: TensorInfo, layer: int, settings: LoraSettings, moe: MoESpec) -> None:
    if layer not in moe.layers:
        raise IncompatibleAdapter(f"tensor {tensor.name!r}: layer {layer} of the base has no experts")
    if settings.layers is not None and layer not in settings.layers:
        raise InvalidAdapter(f"tensor {tensor.name!r}: layer {layer} is not in layers_to_transform")


def _check_nesting(fused: Mapping[tuple[int, bool], ExpertPair]) -> None:
    for (layer, inner), pair in fused.items():
        if inner and (layer, False) not in fused:
            raise InvalidAdapter(f"tensor {pair.a.name!r} belongs inside another pair, which is not there")


def _add(stacks: dict[str, tuple[ModuleInfo, StackedPair]], module: ModuleInfo, stack: StackedPair) -> None:
    """w13 is w1 and w3 together: of a layer either the one or the others."""
    name = module.name
    layer = name.rpartition(".")[0]
    same = [name, *([] if name.endswith(".w2") else [f"{layer}.w13"])]
    for other in same:
        if other in stacks:
            first = stacks[other][1].tensors[0].name
            raise InvalidAdapter(f"tensors {first!r} and {stack.tensors[0].name!r} mean the same thing")
    stacks[name] = module, stack
