"""LoRA on experts, as PEFT wrote it over time: pairs for each expert, or one pair over a fused parameter.

A pair over a parameter of all experts (`target_parameters`) is A [experts * r, in], expert by expert, and
B [out, r * experts], whose columns have the expert running fastest. PEFT before 0.19 took a parameter
[experts, out, in] for [experts, in, out], so that A had the width of the output and B of the input: there the
two change places. Which parameter a pair is for, and which layout a file has, follows from the shapes of all
its pairs; where they allow both, from peft_version; and otherwise the file is refused.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from adapter_store.errors import IncompatibleAdapter, InvalidAdapter
from adapter_store.manifest import ModuleInfo
from adapter_store.moe_spec import MoESpec
from adapter_store.peft_config import CONFIG_FILE, LoraSettings
from adapter_store.peft_keys import PREFIX
from adapter_store.safetensors_file import TensorFile, TensorInfo
from adapter_store.stacked import Order, StackedHalf, StackedPair

Half = Literal["a", "b"]
_KEY = re.compile(
    PREFIX + r"layers\.(?P<layer>0|[1-9][0-9]{0,5})\.(?P<parent>mlp|block_sparse_moe)\.experts\."
    r"(?:(?P<inner>base_layer)\.|(?P<expert>0|[1-9][0-9]{0,5})\.(?P<leaf>[a-z0-9_]+)\.)?"
    r"lora_(?P<half>[AB])(?:\.default)?\.weight"
)
_MATRICES = {
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
    "w1": "w1",
    "w2": "w2",
    "w3": "w3",
}
_PARAMETERS = {"w13": "gate_up_proj", "w2": "down_proj"}
_SWAPPED_BEFORE = (0, 19)


@dataclass
class _Pair:
    """`path`: what PEFT's patterns match; of a fused pair only up to the experts."""

    layer: int
    path: str
    halves: dict[Half, TensorInfo] = field(default_factory=dict)

    @property
    def a(self) -> TensorInfo:
        return self.halves["a"]

    @property
    def b(self) -> TensorInfo:
        return self.halves["b"]


@dataclass(frozen=True)
class Experts:
    modules: tuple[ModuleInfo, ...] = ()
    pairs: Mapping[str, StackedPair] = field(default_factory=dict)  # by module name
    tensors: frozenset[str] = frozenset()  # of the file, that these modules are made of


def read_experts(file: TensorFile, settings: LoraSettings, moe: MoESpec | None) -> Experts:
    """Raises InvalidAdapter, naming the tensor, or IncompatibleAdapter. Nothing where the base has none."""
    if moe is None:
        return Experts()
    fused: dict[tuple[int, bool], _Pair] = {}
    single: dict[tuple[int, str], dict[int, _Pair]] = {}
    for tensor in file:
        match = _KEY.fullmatch(tensor.name)
        if match is None:
            continue
        layer = _checked_layer(tensor, int(match["layer"]), settings, moe)
        path = f"model.layers.{layer}.{match['parent']}.experts"
        if match["expert"] is None:
            pair = fused.setdefault((layer, match["inner"] is not None), _Pair(layer, path))
        else:
            matrix, expert = _checked_expert(tensor, match["leaf"], int(match["expert"]), moe)
            pairs = single.setdefault((layer, matrix), {})
            pair = pairs.setdefault(expert, _Pair(layer, f"{path}.{expert}.{match['leaf']}"))
        _put(pair, "a" if match["half"] == "A" else "b", tensor)
    return _modules(fused, single, settings, moe)


def _modules(
    fused: Mapping[tuple[int, bool], _Pair],
    single: Mapping[tuple[int, str], Mapping[int, _Pair]],
    settings: LoraSettings,
    moe: MoESpec,
) -> Experts:
    _check_nesting(fused)
    for pair in (*fused.values(), *(pair for pairs in single.values() for pair in pairs.values())):
        _check_pair(pair)
    modules: dict[str, tuple[ModuleInfo, StackedPair]] = {}
    swapped = _is_swapped(fused.values(), settings, moe)
    for pair in fused.values():
        name, module, stack = _from_fused(pair, swapped, settings, moe)
        _add(modules, name, module, stack)
    for (layer, matrix), pairs in single.items():
        name = f"layers.{layer}.experts.{matrix}"
        if matrix != "w2" and f"layers.{layer}.experts.w13" in modules:
            raise InvalidAdapter(
                f"tensor {next(iter(pairs.values())).a.name!r}: gate_up_proj of this layer has a pair as well"
            )
        _add(modules, name, *_from_single(name, pairs, settings, moe))
    found = {name: stack for name, (_, stack) in modules.items()}
    used = frozenset(tensor.name for stack in found.values() for tensor in stack.tensors)
    return Experts(tuple(module for module, _ in modules.values()), found, used)


def _add(
    modules: dict[str, tuple[ModuleInfo, StackedPair]], name: str, module: ModuleInfo, stack: StackedPair
) -> None:
    if name in modules:
        first = modules[name][1].tensors[0].name
        raise InvalidAdapter(f"tensors {first!r} and {stack.tensors[0].name!r} mean the same thing")
    modules[name] = module, stack


def _from_fused(
    pair: _Pair, swapped: bool, settings: LoraSettings, moe: MoESpec
) -> tuple[str, ModuleInfo, StackedPair]:
    (matrix,) = (name for name, other in _readings(pair, moe) if other == swapped)
    path = f"{pair.path}.{_PARAMETERS[matrix]}"
    rank = pair.a.shape[0] // moe.num_experts
    _check_rank(pair.a, rank, path, settings)
    in_features, out_features = moe.places[f"experts.{matrix}"]
    columns = Order.COLUMN_BLOCKS if settings.expert_blocks_in_b else Order.COLUMNS
    rows = StackedHalf(Order.ROWS, moe.num_experts, rank, pair.a.shape[1], {0: pair.a})
    across = StackedHalf(columns, moe.num_experts, rank, pair.b.shape[0], {0: pair.b})
    name = f"layers.{pair.layer}.experts.{matrix}"
    module = ModuleInfo(name, rank, settings.scale_at(path), in_features, out_features, moe.num_experts)
    return name, module, StackedPair(across, rows) if swapped else StackedPair(rows, across)


def _from_single(
    name: str, pairs: Mapping[int, _Pair], settings: LoraSettings, moe: MoESpec
) -> tuple[ModuleInfo, StackedPair]:
    in_features, out_features = moe.places[name.split(".", 2)[2]]
    first = pairs[min(pairs)]
    rank, scale = first.a.shape[0], settings.scale_at(first.path)
    for pair in pairs.values():
        _check_rank(pair.a, pair.a.shape[0], pair.path, settings)
        for tensor, wanted in ((pair.a, (pair.a.shape[0], in_features)), (pair.b, (out_features, rank))):
            if tensor.shape != wanted and tensor is pair.a:
                raise IncompatibleAdapter(_shape(tensor, [wanted[0], wanted[1]]))
            if tensor.shape[0] != out_features and tensor is pair.b:
                raise IncompatibleAdapter(_shape(tensor, [out_features, pair.a.shape[0]]))
        if pair.a.shape[0] != rank or settings.scale_at(pair.path) != scale:
            raise InvalidAdapter(
                f"tensor {pair.a.name!r} has another rank or scale than {first.a.name!r}: all experts of a "
                "layer's matrix must have the same"
            )
        if {pair.a.dtype, pair.b.dtype} != {first.a.dtype, first.b.dtype}:
            raise InvalidAdapter(f"tensor {pair.a.name!r} has another dtype than {first.a.name!r}")
    a = StackedHalf(Order.EACH_A, moe.num_experts, rank, in_features, {e: p.a for e, p in pairs.items()})
    b = StackedHalf(Order.EACH_B, moe.num_experts, rank, out_features, {e: p.b for e, p in pairs.items()})
    module = ModuleInfo(name, rank, scale, in_features, out_features, moe.num_experts)
    return module, StackedPair(a, b)


def _readings(pair: _Pair, moe: MoESpec) -> list[tuple[str, bool]]:
    """(matrix, with A and B swapped) for each that the pair's widths allow."""
    widths = pair.a.shape[1], pair.b.shape[0]
    found = [(matrix, False) for matrix in _PARAMETERS if moe.places[f"experts.{matrix}"] == widths]
    if not moe.fused:
        swapped = widths[::-1]
        found += [(matrix, True) for matrix in _PARAMETERS if moe.places[f"experts.{matrix}"] == swapped]
    return found


def _is_swapped(pairs: Iterable[_Pair], settings: LoraSettings, moe: MoESpec) -> bool:
    possible = {False, True}
    for pair in pairs:
        if pair.a.shape[0] % moe.num_experts:
            raise IncompatibleAdapter(
                f"tensor {pair.a.name!r} has {pair.a.shape[0]} rows, which {moe.num_experts} experts of the base "
                "do not divide"
            )
        readings = {swapped for _, swapped in _readings(pair, moe)}
        if not readings:
            shapes = f"shape {list(pair.a.shape)}, its lora_B {list(pair.b.shape)}"
            raise IncompatibleAdapter(
                f"tensor {pair.a.name!r} has {shapes}: the base has no such experts"
            )
        if not possible & readings:
            raise InvalidAdapter(
                f"tensor {pair.a.name!r} has in and out the other way round than the file's other experts"
            )
        possible &= readings
        last = pair
    if len(possible) == 1 or not any(True for _ in pairs):
        return possible == {True}
    version = _version(settings.peft_version)
    if version is None:
        raise InvalidAdapter(
            f"tensor {last.a.name!r}: by its shape it may be of PEFT before 0.19 or after, and A and B mean "
            f"other things there; {CONFIG_FILE}: set peft_version to the one that wrote it"
        )
    return version < _SWAPPED_BEFORE


def _version(text: str | None) -> tuple[int, int] | None:
    """None also for development versions, which stand on either side of the change."""
    match = re.fullmatch(r"(\d+)\.(\d+)(?:\.\d+)*(?:\.post\d+)?", text or "")
    return (int(match[1]), int(match[2])) if match else None


def _check_nesting(fused: Mapping[tuple[int, bool], _Pair]) -> None:
    for (layer, inner), pair in fused.items():
        if inner and (layer, False) not in fused:
            first = next(iter(pair.halves.values())).name
            raise InvalidAdapter(
                f"tensor {first!r} belongs inside another pair, which the file does not have"
            )


def _check_pair(pair: _Pair) -> None:
    for half, other in (("a", "b"), ("b", "a")):
        if half not in pair.halves:
            name = pair.halves[other].name  # type: ignore[index]
            raise InvalidAdapter(f"tensor {name!r} has no matching lora_{half.upper()}")
    for tensor in (pair.a, pair.b):
        if len(tensor.shape) != 2:
            raise InvalidAdapter(f"tensor {tensor.name!r} has {len(tensor.shape)} dimensions, not 2")
    if pair.a.shape[0] != pair.b.shape[1]:
        raise InvalidAdapter(
            f"tensor {pair.b.name!r} has rank {pair.b.shape[1]}, its lora_A has {pair.a.shape[0]}"
        )


def _check_rank(tensor: TensorInfo, rank: int, path: str, settings: LoraSettings) -> None:
    if settings.rank_at(path) != rank:
        raise InvalidAdapter(
            f"tensor {tensor.name!r} has rank {rank}, {CONFIG_FILE} says {settings.rank_at(path)}"
        )


def _checked_layer(tensor: TensorInfo, layer: int, settings: LoraSettings, moe: MoESpec) -> int:
    if layer not in moe.layers:
        raise IncompatibleAdapter(f"tensor {tensor.name!r}: layer {layer} of the base has no experts")
    if settings.layers is not None and layer not in settings.layers:
        raise InvalidAdapter(f"tensor {tensor.name!r}: layer {layer} is not in layers_to_transform")
    return layer


def _checked_expert(tensor: TensorInfo, leaf: str, expert: int, moe: MoESpec) -> tuple[str, int]:
    matrix = _MATRICES.get(leaf)
    if matrix is None or moe.fused:
        raise InvalidAdapter(f"tensor {tensor.name!r} matches no module of the base model")
    if expert >= moe.num_experts:
        raise IncompatibleAdapter(f"tensor {tensor.name!r}: the base has {moe.num_experts} experts")
    return matrix, expert


def _put(pair: _Pair, half: Half, tensor: TensorInfo) -> None:
    if half in pair.halves:
        raise InvalidAdapter(f"tensors {pair.halves[half].name!r} and {tensor.name!r} mean the same thing")
    pair.halves[half] = tensor


def _shape(tensor: TensorInfo, wanted: list[int]) -> str:
    return f"tensor {tensor.name!r} has shape {list(tensor.shape)}, the base needs {wanted}"
