"""What a config promises and the weights do not hold: biases, modules, layers, or any effect at all.

PEFT itself loads such files without an error. So do we where the answers are those of PEFT after that, but
the push is told.
"""

from collections.abc import Collection, Iterable, Mapping
from itertools import chain

import numpy as np

from adapter_store.errors import InvalidAdapter
from adapter_store.files.safetensors_file import TensorFile, TensorInfo
from adapter_store.manifest import ModuleInfo, PushWarning
from adapter_store.model_spec import ModelSpec
from adapter_store.module_names import is_expert, layer_of, place_of
from adapter_store.peft.config import CONFIG_FILE, LoraSettings, few, tails
from adapter_store.peft.stacked import Order, StackedPair

_SHOWN = 3  # names in a message; the rest is counted
_SHOWN_CHARS = 80
_CHUNK_ELEMENTS = 1 << 16
_PARAMETERS = {"w13": "gate_up_proj", "w2": "down_proj"}


def check_promises(
    file: TensorFile,
    modules: Collection[ModuleInfo],
    experts: Mapping[str, StackedPair],
    settings: LoraSettings,
    spec: ModelSpec,
) -> list[PushWarning]:
    """`modules`: all that the file has LoRA for, `experts` among them. Raises InvalidAdapter."""
    names = {module.name for module in modules}
    return [
        *_lost_biases(names, settings, spec),
        *_missing_names(file, settings),
        *_missing_modules(names, settings, spec),
        *_missing_layers(names, settings),
        *_other_parameters(experts, settings),
    ]


def without_effect(
    file: TensorFile, plain: Iterable[Mapping[str, TensorInfo]], experts: Iterable[StackedPair]
) -> list[PushWarning]:
    """`plain`: pairs as {"a": ..., "b": ...}. Reads no further than to the first values that are not 0."""
    stacked = ((a, stack.b.tensors[expert]) for stack in experts for expert, a in stack.a.tensors.items())
    pairs = chain(((pair["a"], pair["b"]) for pair in plain), stacked)
    if any(_has_values(file, a) and _has_values(file, b) for a, b in pairs):
        return []
    text = "every lora_A or lora_B is zero: the adapter changes nothing (saved before it was trained?)"
    return [PushWarning("NO_EFFECT", text)]


def _lost_biases(names: Collection[str], settings: LoraSettings, spec: ModelSpec) -> list[PushWarning]:
    """The file has no biases, else it had been refused by their names.

    With "all" every PEFT saves the base's biases, so a file without them is not what was trained. With
    "lora_only" PEFT up to 0.19 trained those of its modules and saved none: what it loads again is served.
    """
    if settings.bias == "all" and spec.biased:
        raise InvalidAdapter(
            f"{CONFIG_FILE}: bias is 'all', which trains the base's biases of {_listed(spec.biased)}, but "
            "the file has none: they are lost. Say 'none' if they were not trained"
        )
    lost = spec.biased & {place_of(name) for name in names}
    if settings.bias != "lora_only" or not lost:
        return []
    text = f"{CONFIG_FILE}: bias is 'lora_only', but the file has no trained bias of {_listed(lost)}: those"
    return [PushWarning("LOST_BIASES", f"{text} of the base are used")]


def _missing_names(file: TensorFile, settings: LoraSettings) -> list[PushWarning]:
    """The paths as the file has them: older ones have other names for some."""
    missing = {name for name in settings.targets if name not in settings.full_heads}
    for tensor in file:
        if not missing:  # as a rule after one layer
            break
        missing.difference_update(tails(tensor.name.partition(".lora_")[0]))
    if not missing:
        return []
    text = f"{CONFIG_FILE}: target_modules has {_listed(missing)}, of which the file has no tensors"
    return [PushWarning("TARGETS_WITHOUT_TENSORS", text)]


def _missing_modules(names: Collection[str], settings: LoraSettings, spec: ModelSpec) -> list[PushWarning]:
    """Modules that the file has in some layers, and that PEFT would have given to others, too."""
    places = {place_of(name) for name in names if layer_of(name) is not None and not is_expert(name)}
    layers = [each for each in range(spec.num_layers) if settings.layers is None or each in settings.layers]
    wanted = {f"layers.{layer}.{place}" for layer in layers for place in places - {"router"}}
    missing = [
        module
        for module in wanted - {*names}
        if spec.has_place_for(module) and settings.is_target(spec.path_of(module))
    ]
    if not missing:
        return []
    text = f"{CONFIG_FILE}: target_modules includes {_listed(missing)}, of which the file has no tensors"
    return [PushWarning("MODULES_WITHOUT_TENSORS", text)]


def _missing_layers(names: Collection[str], settings: LoraSettings) -> list[PushWarning]:
    missing = sorted((settings.layers or frozenset()) - {layer_of(name) for name in names})
    if not missing:
        return []
    text = f"{CONFIG_FILE}: layers_to_transform has {_listed(map(str, missing))}"
    return [PushWarning("LAYERS_WITHOUT_TENSORS", f"{text}, of which the file has no tensors")]


def _other_parameters(experts: Mapping[str, StackedPair], settings: LoraSettings) -> list[PushWarning]:
    """The shapes decide; a config that names another parameter is of another file."""
    fused = (name for name, stack in experts.items() if stack.a.order is not Order.EACH_A)
    found = {_PARAMETERS[name.rpartition(".")[2]] for name in fused}
    named = {each.rpartition(".")[2] for each in settings.target_parameters} & {*_PARAMETERS.values()}
    if found == named or not named:
        return []
    text = f"{CONFIG_FILE}: target_parameters has {_listed(named)} of the experts"
    text += f", by their shapes the file's tensors are of {_listed(found) or 'none'}"
    return [PushWarning("OTHER_PARAMETERS", text)]


def _has_values(file: TensorFile, tensor: TensorInfo) -> bool:
    values = file.array(tensor.name).reshape(-1)
    chunks = range(0, values.size, _CHUNK_ELEMENTS)
    return any(bool(np.any(values[start : start + _CHUNK_ELEMENTS])) for start in chunks)


def _listed(names: Iterable[str]) -> str:
    return few([name[:_SHOWN_CHARS] for name in sorted(names)], _SHOWN)
