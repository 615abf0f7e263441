"""mlx-lm's adapters: A and B the other way round, and a scale in place of alpha.

A file has lora_a [in, r] and lora_b [r, out] under the model's own names, with DoRA also m [out]. Layers of
experts have stacks: lora_a [experts, r, in] (before October 2025 [experts * r, in]) and lora_b
[experts, out, r]. The config's scale multiplies B A x.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from adapter_store.convert.peft_form import (
    Array,
    Pair,
    PeftForm,
    open_tensors,
    positive_integer,
    scale_factor,
)
from adapter_store.errors import InvalidAdapter
from adapter_store.peft.config import CONFIG_FILE, MAX_CONFIG_BYTES, read_json_object

WEIGHTS_FILE = "adapters.safetensors"
_EXPERTS = re.compile(r"(?P<layer>.*\.(?P<parent>mlp|block_sparse_moe))\.switch_mlp\.(?P<leaf>[a-z]+_proj)")
_LEAVES = {
    "mlp": {leaf: leaf for leaf in ("gate_proj", "up_proj", "down_proj")},
    "block_sparse_moe": {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
}


def from_mlx(folder: Path) -> PeftForm:
    """Raises InvalidAdapter, naming the field or the tensor."""
    config = read_json_object(folder / CONFIG_FILE, MAX_CONFIG_BYTES)
    parameters = _parameters(config)
    rank = positive_integer(CONFIG_FILE, "lora_parameters.rank", parameters.get("rank"))
    pairs = dict(_pairs(_by_module(folder / WEIGHTS_FILE), rank))
    asked = config.get("fine_tune_type") == "dora" or config.get("use_dora") is True
    if asked != any(pair.magnitude is not None for pair in pairs.values()):
        raise InvalidAdapter(f"{CONFIG_FILE} and {WEIGHTS_FILE} do not agree on whether this is DoRA")
    base = config.get("model")
    scale = _scale(config, parameters, rank)
    return PeftForm.of_pairs(pairs, rank, scale, base if isinstance(base, str) else None)


def _parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    if "peft_type" in config:
        raise InvalidAdapter(f"{CONFIG_FILE} is PEFT's, but {WEIGHTS_FILE} is mlx-lm's: a mixture of two")
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        raise InvalidAdapter(f"{CONFIG_FILE}: fine_tune_type is {kind!r}, only lora and dora are adapters")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise InvalidAdapter(f"{CONFIG_FILE}: lora_parameters is missing, which says rank and scale")
    return parameters


def _scale(config: Mapping[str, Any], parameters: Mapping[str, Any], rank: int) -> float:
    """mlx-lm multiplied by scale * alpha / rank until June 2024, and by scale alone since, with an alpha in
    its default config until April 2025. num_layers is in configs since September 2024."""
    scale = scale_factor(CONFIG_FILE, "lora_parameters.scale", parameters.get("scale"))
    alpha = parameters.get("alpha", rank)
    if "num_layers" not in config and alpha != rank:
        old = scale * scale_factor(CONFIG_FILE, "lora_parameters.alpha", alpha) / rank
        raise InvalidAdapter(
            f"{CONFIG_FILE}: lora_parameters has an alpha, which mlx-lm used before June 2024 (the scale is "
            f"{old:g}) and not later (it is {scale:g}): write the right one as scale, and remove alpha"
        )
    return scale


def _by_module(path: Path) -> dict[str, dict[str, Array]]:
    modules: dict[str, dict[str, Array]] = {}
    file = open_tensors(path)
    for tensor in file:
        module, _, part = tensor.name.rpartition(".")
        if part not in ("lora_a", "lora_b", "m"):
            raise InvalidAdapter(f"tensor {tensor.name[:200]!r} of {path.name} is no part of a LoRA or DoRA")
        if module.endswith("embed_tokens"):
            raise InvalidAdapter(
                f"tensor {tensor.name!r}: mlx-lm applies LoRA of embeddings to a tied lm_head, too, and the "
                "file does not say whether it is tied: not converted"
            )
        modules.setdefault(module, {})[part] = file.array(tensor.name)
    return modules


def _pairs(modules: Mapping[str, Mapping[str, Array]], rank: int) -> Iterator[tuple[str, Pair]]:
    for module, parts in modules.items():
        for half in ("lora_a", "lora_b"):
            if half not in parts:
                raise InvalidAdapter(f"{module} has no {half} in {WEIGHTS_FILE}")
        a, b = parts["lora_a"], parts["lora_b"]
        if b.ndim == 3:
            yield from _expert_pairs(module, a, b, rank)
        elif a.ndim == b.ndim == 2:
            yield module, Pair(a.T, b.T, parts.get("m"))
        else:
            raise InvalidAdapter(f"{module}: lora_a {a.shape} and lora_b {b.shape} are no pair")


def _expert_pairs(module: str, a: Array, b: Array, rank: int) -> Iterator[tuple[str, Pair]]:
    match = _EXPERTS.fullmatch(module)
    if match is None or match["leaf"] not in _LEAVES[match["parent"]]:
        raise InvalidAdapter(f"{module}: LoRA of these experts is not converted")
    experts = b.shape[0]
    if a.shape[:-1] not in ((experts, rank), (experts * rank,)):
        raise InvalidAdapter(f"{module}: lora_a {a.shape} and lora_b {b.shape} are no pair of rank {rank}")
    leaf = _LEAVES[match["parent"]][match["leaf"]]
    for expert, own in enumerate(a.reshape(experts, rank, -1)):
        yield f"{match['layer']}.experts.{expert}.{leaf}", Pair(own, b[expert])
