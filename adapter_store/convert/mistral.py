"""mistral-finetune's adapters: Mistral's own names, and rows of q and k in Mistral's rotary order.

A file has lora_A.weight [r, in] and lora_B.weight [out, r], as PEFT. Mistral turns neighbouring rows of a
head, 2i and 2i + 1, where transformers turns rows i and i + head_dim / 2: so the rows of q's and k's
lora_B change places. lora.scaling of params.json multiplies B A x.
"""

import re
from collections.abc import Mapping
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
from adapter_store.peft.config import MAX_CONFIG_BYTES, read_json_object

WEIGHTS_FILE = "lora.safetensors"
PARAMS_FILE = "params.json"
_KEY = re.compile(
    r"layers\.(?P<layer>\d+)\.(?P<place>attention\.w[qkvo]|feed_forward\.(?P<expert>experts\.\d+\.)?w[123])"
    r"\.lora_(?P<half>[AB])\.weight"
)
_PATHS = {
    **{f"attention.w{x}": f"self_attn.{x}_proj" for x in "qkvo"},
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_HEADS = {"attention.wq": "n_heads", "attention.wk": "n_kv_heads"}


def from_mistral(folder: Path) -> PeftForm:
    """Raises InvalidAdapter, naming the field or the tensor."""
    params = read_json_object(folder / PARAMS_FILE, MAX_CONFIG_BYTES)
    lora = params.get("lora")
    if not isinstance(lora, dict):
        raise InvalidAdapter(
            f"{PARAMS_FILE}: lora is missing, which says rank and scaling: the training's own file has it, "
            "the base's has not (mistral-finetune's scaling is 2.0 unless it was told another)"
        )
    rank = positive_integer(PARAMS_FILE, "lora.rank", lora.get("rank"))
    scale = scale_factor(PARAMS_FILE, "lora.scaling", lora.get("scaling"))
    return PeftForm.of_pairs(_pairs(folder / WEIGHTS_FILE, params), rank, scale, None)


def _pairs(path: Path, params: Mapping[str, Any]) -> dict[str, Pair]:
    file = open_tensors(path)
    halves: dict[str, dict[str, Array]] = {}
    for tensor in file:
        match = _KEY.fullmatch(tensor.name)
        if match is None:
            raise InvalidAdapter(
                f"tensor {tensor.name[:200]!r} of {path.name} is no LoRA of attention or feed_forward: it is "
                "not served, and the adapter is not whole without"
            )
        array = file.array(tensor.name)
        if array.ndim != 2:
            raise InvalidAdapter(f"tensor {tensor.name!r} has {array.ndim} dimensions, not 2")
        if match["half"] == "B" and match["place"] in _HEADS:
            array = _in_halves(tensor.name, array, _HEADS[match["place"]], params)
        halves.setdefault(_module(match), {})[match["half"]] = array
    for module, pair in halves.items():
        for half in "AB":
            if half not in pair:
                raise InvalidAdapter(f"{module} has no lora_{half} in {path.name}")
    return {module: Pair(pair["A"], pair["B"]) for module, pair in halves.items()}


def _module(match: re.Match[str]) -> str:
    layer, place = f"model.layers.{match['layer']}", match["place"]
    if match["expert"]:
        return f"{layer}.block_sparse_moe.{place.removeprefix('feed_forward.')}"
    return f"{layer}.{_PATHS[place]}"


def _in_halves(name: str, b: Array, heads_field: str, params: Mapping[str, Any]) -> Array:
    """The rows of each head: first the even ones, then the odd ones."""
    heads = positive_integer(PARAMS_FILE, heads_field, params.get(heads_field))
    head_dim = positive_integer(PARAMS_FILE, "head_dim", params.get("head_dim"))
    if head_dim % 2 or b.shape[0] != heads * head_dim:
        raise InvalidAdapter(
            f"tensor {name!r} has {b.shape[0]} rows, {PARAMS_FILE} says {heads} heads of {head_dim}"
        )
    return b.reshape(heads, head_dim // 2, 2, -1).swapaxes(1, 2).reshape(b.shape)
