"""Names of tensors in PEFT files: which module and which half a key means, or why it is refused."""

import re
from dataclasses import dataclass
from typing import Literal

from adapter_store.errors import InvalidAdapter
from adapter_store.model_spec import ModelSpec
from adapter_store.module_names import PATHS_IN_LAYER

# PEFT writes "base_model.model." + the module's path in transformers ("model.layers.0...."). Trainers drop
# one or both prefixes, those of image-text models add "language_model."; all mean the same module.
PREFIX = r"(?:base_model\.model\.)?(?:model\.)?(?:language_model\.(?:model\.)?)?"
_KEY = re.compile(
    PREFIX + r"(?:layers\.(?P<layer>0|[1-9][0-9]{0,5})\.(?P<path>[a-z_]+(?:\.[a-z_]+){1,2})"
    r"|(?P<table>embed_tokens|lm_head))\.(?P<part>(?:lora_|base_layer\.|original_module\.|modules_to_save\.|weight).*)"
)
# Also under the names that Mixtral's router had, and gpt-oss's has.
_PLACES = {
    **{path: place for place, path in PATHS_IN_LAYER.items() if not place.startswith("experts.")},
    "block_sparse_moe.gate": "router",
    "mlp.router": "router",
}
_LINEAR_PART = re.compile(r"lora_(?P<half>[AB])(?:\.default)?\.weight")
_EMBEDDING_PART = re.compile(r"lora_embedding_(?P<half>[AB])(?:\.default)?")
_MAGNITUDE_PART = re.compile(r"lora_magnitude_vector(?:\.default)?(?:\.weight)?")
_NAMED_PART = re.compile(r"lora_(?:embedding_)?[AB]\.(?P<adapter>(?!weight$)[^.]+)(?:\.weight)?")
_BASE_COPY_PARTS = ("base_layer.weight", "original_module.weight")
_WHOLE_PART = re.compile(r"(?:modules_to_save\.(?:default\.)?)?weight")

# First match wins; looked for anywhere in a key that means nothing we serve.
_WRAPPED = "is of a model inside a wrapper: save the model that is inside (accelerate's unwrap_model)"
_TWICE = "is of a model that PEFT wrapped twice: give get_peft_model the plain model, and save again"
_OTHER_NAMES = "has a name that PEFT does not write: convert it to PEFT's lora_A.weight and lora_B.weight"
_NO_MODULE = "matches no module of the base model that can carry LoRA"
_EXPERTS_OF_NONE = (".experts.", ".mlp.gate.")  # marks that are the reason only where the base has none
_EXPERT_NAMES = (
    "is of experts under a name that PEFT does not write: it has experts.lora_A for all of them (around "
    "experts.base_layer.lora_A, if there are two), and experts.0.up_proj.lora_A for one"
)
_REASONS = (
    ("base_model.model.base_model.model.", _TWICE),
    *((mark, _WRAPPED) for mark in ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")),
    *((mark, _OTHER_NAMES) for mark in (".lora_down.", ".lora_up.", ".lora.down.", ".lora.up.")),
    (".lora_E", "belongs to AdaLoRA, which is not served"),
    ("token_adapter", "belongs to trainable_token_indices, which is not served"),
    ("trainable_tokens", "belongs to trainable_token_indices, which is not served"),
    (".experts.", "matches no mixture-of-experts layer of the base model"),
    (".mlp.gate.", "matches no mixture-of-experts router of the base model"),
    (
        "modules_to_save",
        "is a fully trained module (modules_to_save): only lm_head and embed_tokens are served so",
    ),
    (".bias", "is a trained bias (bias, lora_bias), which is not served"),
    ("lora_", _NO_MODULE),
    (".weight", "is a fully trained weight (modules_to_save?): only lm_head and embed_tokens are served so"),
)


# DoRA's magnitude; a copy of the base layer's own weight; a whole one, fully trained or such a copy.
Part = Literal["a", "b", "magnitude", "base", "whole"]


@dataclass(frozen=True, slots=True)
class KeyMeaning:
    module: str  # packed name: "layers.0.q_proj", "embed_tokens", "lm_head"
    layer: int | None
    part: Part


def parse_key(key: str, spec: ModelSpec) -> KeyMeaning:
    """Raises InvalidAdapter for a tensor that would end up unused, with the likely reason."""
    match = _KEY.fullmatch(key)
    if match is None:
        raise _unused(key, spec)
    layer, place, table = match["layer"], _PLACES.get(match["path"] or ""), match["table"]
    if table is None and place not in spec.modules:
        raise _unused(key, spec)
    if table is not None and match["part"] in _BASE_COPY_PARTS:
        return KeyMeaning(table, None, "base")
    if table is not None and _WHOLE_PART.fullmatch(match["part"]):
        return KeyMeaning(table, None, "whole")
    part = _part(match["part"], embedding=table == "embed_tokens")
    if part is None:
        raise _unused(key, spec, match)
    if table is not None:
        return KeyMeaning(table, None, part)
    return KeyMeaning(f"layers.{layer}.{place}", int(layer), part)


def _part(text: str, *, embedding: bool) -> Part | None:
    if _MAGNITUDE_PART.fullmatch(text):
        return "magnitude"
    half = (_EMBEDDING_PART if embedding else _LINEAR_PART).fullmatch(text)
    if half is None:
        return None
    return "a" if half["half"] == "A" else "b"


def _unused(key: str, spec: ModelSpec, match: re.Match[str] | None = None) -> InvalidAdapter:
    """`match`: where the base has the key's module, and only the part behind it means nothing."""
    passed_over = () if spec.moe is None else _EXPERTS_OF_NONE
    reasons = (why for mark, why in _REASONS if mark in key and mark not in passed_over)
    reason = next(reasons, "is not a LoRA tensor")
    if key.startswith("module."):
        reason = _WRAPPED
    elif match is not None and (named := _NAMED_PART.fullmatch(match["part"])):
        reason = f"is of an adapter named {named['adapter']!r}: PEFT's save_pretrained leaves that name out"
    elif match is not None and match["table"] == "embed_tokens" and _LINEAR_PART.fullmatch(match["part"]):
        reason = "is of a linear layer, and embed_tokens is none: PEFT writes lora_embedding_A and _B"
    elif reason == _NO_MODULE and spec.moe is not None and ".experts." in key:
        reason = _EXPERT_NAMES
    return InvalidAdapter(f"tensor {key[:200]!r} {reason}")
