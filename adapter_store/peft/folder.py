"""Reads a PEFT folder and checks all of it but its values against the base model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapter_store.base.model_name import model_name
from adapter_store.errors import IncompatibleAdapter, InvalidAdapter
from adapter_store.files.safetensors_file import NUMPY_DTYPES, DamagedFile, TensorFile, TensorInfo
from adapter_store.manifest import FullHead, ModuleInfo, PushFacts, PushWarning, TextRules
from adapter_store.model_spec import ModelSpec
from adapter_store.module_names import in_model_order, layer_of, place_of
from adapter_store.peft.base_copy import check_base_copy
from adapter_store.peft.config import CONFIG_FILE, LoraSettings, few, read_config
from adapter_store.peft.experts import read_experts
from adapter_store.peft.foreign import foreign_file
from adapter_store.peft.full_heads import check_full_heads, named_heads
from adapter_store.peft.keys import KeyMeaning, parse_key
from adapter_store.peft.promises import check_promises, without_effect
from adapter_store.peft.shapes import check_matrix, wrong_shape
from adapter_store.peft.stacked import StackedPair
from adapter_store.peft.text_rules import read_text_rules
from adapter_store.peft.tokenizer import check_tokenizer, read_chat_template
from adapter_store.peft.vocabulary import check_vocabulary

WEIGHTS_FILE = "adapter_model.safetensors"
_SHOWN_CHARS = 200
_SHOWN = 6  # folders in a message


@dataclass(frozen=True)
class Halves:
    """One module's pair as PEFT stores it: A [r, in], B [out, r]; with DoRA the magnitude [out]."""

    a: TensorInfo
    b: TensorInfo
    magnitude: TensorInfo | None = None


@dataclass(frozen=True)
class PeftAdapter:
    modules: tuple[ModuleInfo, ...]
    halves: Mapping[str, Halves]  # by module name
    file: TensorFile
    push: PushFacts
    chat_template: str | None
    text: TextRules
    experts: Mapping[str, StackedPair] = field(default_factory=dict)  # as halves, of the experts' modules
    full_heads: tuple[FullHead, ...] = ()
    head_tensors: Mapping[str, TensorInfo] = field(default_factory=dict)  # by the full heads' names

    def lora_a(self, module: str) -> NDArray[Any]:
        return self.file.array(self.halves[module].a.name)

    def lora_b(self, module: str) -> NDArray[Any]:
        """[out, r], as in the file."""
        return self.file.array(self.halves[module].b.name)


def read_adapter(
    folder: Path, spec: ModelSpec, *, strict_base: bool = False, file: TensorFile | None = None
) -> PeftAdapter:
    """`file`: the weights, where they are not in the folder. Most values are looked at when they are packed.

    Raises InvalidAdapter (file, field or tensor named) or IncompatibleAdapter (made for another base).
    """
    settings = read_config(folder)
    warnings = (*settings.warnings, *_check_base_name(settings, spec, strict_base))
    file = file or open_weights(folder)
    if settings.target_parameters and spec.moe is None:
        raise InvalidAdapter(f"{CONFIG_FILE}: target_parameters, but the base {spec.name} has no experts")
    _check_tensors(file)
    check_vocabulary(file, spec)
    experts = read_experts(file, settings, spec.moe)
    pairs, copies, wholes = _sort_tensors(file, experts.tensors, spec)
    named = named_heads(settings, spec)
    heads = {name: tensor for name, tensor in wholes.items() if name in named}
    copies += [(name, tensor) for name, tensor in wholes.items() if name not in named]
    full_heads = check_full_heads(file, heads, pairs, settings, spec)
    plain = [_check_module(name, pairs[name], settings, spec) for name in pairs]
    modules = tuple(sorted([*plain, *experts.modules], key=lambda module: in_model_order(module.name)))
    halves = {name: Halves(pair["a"], pair["b"], pair.get("magnitude")) for name, pair in pairs.items()}
    for module, copy in copies:
        check_base_copy(file, copy, module, spec)
    warnings += tuple(check_promises(file, modules, experts.pairs, settings, spec))
    if not (full_heads or settings.use_dora):
        warnings += tuple(without_effect(file, pairs.values(), experts.pairs.values()))
    warnings += tuple(check_tokenizer(folder, spec))
    template, template_warnings = read_chat_template(folder)
    text, text_warnings = read_text_rules(folder, spec)
    warnings += (*template_warnings, *text_warnings)
    adapter = PeftAdapter(
        modules,
        halves,
        file,
        PushFacts(settings.base_model, settings.peft_version, warnings),
        None if template is None else template.text,
        text,
        experts.pairs,
        full_heads,
        heads,
    )
    if settings.ensure_weight_tying and spec.tied_head:
        _check_tied_pair(adapter)
    return adapter


def open_weights(folder: Path) -> TensorFile:
    path = folder / WEIGHTS_FILE
    if not path.exists():
        raise InvalidAdapter(f"{WEIGHTS_FILE} is missing{_what_is_there(folder)}")
    try:
        return TensorFile.open(path)
    except (DamagedFile, OSError) as error:
        raise InvalidAdapter(str(error)) from error


def _what_is_there(folder: Path) -> str:
    """What the caller may have meant, in place of a whole adapter."""
    if foreign := foreign_file(path.name for path in folder.iterdir()):
        return f": {foreign}"
    found = (path for depth in ("*", "*/*") for path in folder.glob(f"{depth}/{WEIGHTS_FILE}"))
    below = sorted(f"{path.parent.relative_to(folder)}/" for path in found)
    if len(below) <= 1:
        return f": {below[0]} in it has an adapter, push that folder" if below else ""
    return f": {few(below, _SHOWN)} in it have adapters, push the one that is meant"


def _check_base_name(settings: LoraSettings, spec: ModelSpec, strict: bool) -> list[PushWarning]:
    """Shapes decide the base; its name is a hint, since the same model lives under many paths. Capitals do
    not count: trainers write names in small letters."""
    if model_name(settings.base_model).casefold() in ("", spec.name.casefold()):
        return []
    text = f"{CONFIG_FILE}: base_model_name_or_path is {settings.base_model[:_SHOWN_CHARS]!r}"
    text += f", this base is {spec.name!r}"
    if strict:
        raise IncompatibleAdapter(text)
    return [PushWarning("OTHER_BASE_MODEL", text)]


def _check_tensors(file: TensorFile) -> None:
    for tensor in file:
        if 0 in tensor.shape:
            raise InvalidAdapter(
                f"tensor {tensor.name!r} is empty (shape {list(tensor.shape)}): gather shards before saving"
            )


def _sort_tensors(
    file: TensorFile, taken: frozenset[str], spec: ModelSpec
) -> tuple[dict[str, dict[str, TensorInfo]], list[tuple[str, TensorInfo]], dict[str, TensorInfo]]:
    """Each tensor but the `taken` ones to its place: ({module: {"a": ..., "b": ...}}, [(module, copy of the
    base's weight)], {module: a whole weight})."""
    places: dict[str, dict[str, TensorInfo]] = {}
    for tensor in file:
        if tensor.name in taken:
            continue
        meaning: KeyMeaning = parse_key(tensor.name, spec)
        place = places.setdefault(meaning.module, {})
        if meaning.part not in place:
            place[meaning.part] = tensor
        elif meaning.part != "whole" or not _are_equal(file, place["whole"], tensor):
            raise InvalidAdapter(
                f"tensors {place[meaning.part].name!r} and {tensor.name!r} mean the same thing"
            )
    copies = [(module, place.pop("base")) for module, place in places.items() if "base" in place]
    wholes = {module: place.pop("whole") for module, place in places.items() if "whole" in place}
    pairs = {module: place for module, place in places.items() if place}
    if not pairs and not taken:
        raise InvalidAdapter(f"{WEIGHTS_FILE} holds no LoRA tensors: 0 modules would be applied")
    return pairs, copies, wholes


def _are_equal(file: TensorFile, first: TensorInfo, second: TensorInfo) -> bool:
    """PEFT writes a table that is in modules_to_save a second time where it saves all embeddings, too."""
    alike = (first.dtype, first.shape) == (second.dtype, second.shape)
    return alike and np.array_equal(file.raw(first.name), file.raw(second.name))


def _check_module(
    name: str, pair: Mapping[str, TensorInfo], settings: LoraSettings, spec: ModelSpec
) -> ModuleInfo:
    for half, other in (("a", "b"), ("b", "a")):
        if half not in pair:
            there = pair.get(other) or pair["magnitude"]
            raise InvalidAdapter(f"tensor {there.name!r} has no matching lora_{half.upper()}")
    _check_layer(name, pair["a"], settings, spec)
    a, b = pair["a"], pair["b"]
    in_features, out_features = spec.modules[place_of(name)]
    for tensor in (a, b):
        check_matrix(tensor)
    rank = settings.rank_at(spec.path_of(name))
    # Widths first: of a pair that is no pair for this layer, the rank that it seems to have means nothing.
    found, right = (a.shape, b.shape), ((rank, in_features), (out_features, rank))
    if found != right and found == ((out_features, rank), (rank, in_features)):
        raise InvalidAdapter(f"tensors {a.name!r} and {b.name!r} have changed places")
    if a.shape[1] != in_features:
        raise wrong_shape(a, (rank, in_features), spec.name)
    if b.shape[0] != out_features:
        raise wrong_shape(b, (out_features, rank), spec.name)
    if a.shape[0] != rank:
        raise InvalidAdapter(f"tensor {a.name!r} has rank {a.shape[0]}, {CONFIG_FILE} says {rank}")
    if b.shape[1] != rank:
        raise InvalidAdapter(f"tensor {b.name!r} has rank {b.shape[1]}, its lora_A has {rank}")
    _check_magnitude(pair, settings, out_features)
    scale = settings.scale_at(spec.path_of(name))
    return ModuleInfo(name, rank, scale, in_features, out_features, settings.use_dora)


def _check_magnitude(pair: Mapping[str, TensorInfo], settings: LoraSettings, out_features: int) -> None:
    magnitude = pair.get("magnitude")
    if magnitude is None:
        if settings.use_dora:
            raise InvalidAdapter(f"{CONFIG_FILE}: use_dora is true, but {pair['a'].name!r} has no magnitude")
        return
    if not settings.use_dora:
        raise InvalidAdapter(f"tensor {magnitude.name!r} belongs to DoRA, but {CONFIG_FILE} has no use_dora")
    if magnitude.shape != (out_features,):
        raise InvalidAdapter(
            f"tensor {magnitude.name!r} has shape {list(magnitude.shape)}, not {[out_features]}"
        )
    if magnitude.dtype not in NUMPY_DTYPES:
        raise InvalidAdapter(f"tensor {magnitude.name!r} has dtype {magnitude.dtype}, not F32, F16 or BF16")


def _check_layer(name: str, tensor: TensorInfo, settings: LoraSettings, spec: ModelSpec) -> None:
    layer = layer_of(name)
    if layer is None:
        return
    if layer >= spec.num_layers:
        raise IncompatibleAdapter(
            f"tensor {tensor.name!r} is for layer {layer}, the base {spec.name} has {spec.num_layers}"
        )
    if not spec.has_place_for(name):
        raise IncompatibleAdapter(f"tensor {tensor.name!r}: layer {layer} of the base has no such module")
    if settings.layers is not None and layer not in settings.layers:
        raise InvalidAdapter(f"tensor {tensor.name!r}: layer {layer} is not in layers_to_transform")


def _check_tied_pair(adapter: PeftAdapter) -> None:
    """Checks a pair that is tied: with ensure_weight_tying on a tied base PEFT trains one pair and writes it
    twice, once transposed.

    Read as two plain modules that is right, as long as both are there and equal.
    """
    present = {"embed_tokens", "lm_head"} & adapter.halves.keys()
    if not present:
        return
    if len(present) == 1 or not (
        np.array_equal(adapter.lora_a("lm_head"), adapter.lora_b("embed_tokens").T)
        and np.array_equal(adapter.lora_b("lm_head"), adapter.lora_a("embed_tokens").T)
    ):
        raise InvalidAdapter(
            f"{CONFIG_FILE}: ensure_weight_tying is true, but embed_tokens and lm_head do not hold one "
            "pair and its transpose"
        )
