"""adapter_config.json: every field of PEFT's LoraConfig is honoured, harmless, or refused by name."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adapter_store.errors import InvalidAdapter
from adapter_store.files.lfs_pointer import WHAT_IT_IS, is_pointer_file
from adapter_store.manifest import PushWarning
from adapter_store.peft.patterns import BadPattern, Patterns

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 4 << 20
_MAX_TEXT_CHARS = 4096  # of what is kept with every record of the name: as long as a path may be

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # a listing would send them to an operator's terminal

# Ours, not PEFT's: says that a trainer packed lora_B of fused experts expert by expert ("blocks") instead of
# letting the expert run fastest ("interleaved", what PEFT does). The files do not show it.
EXPERT_ORDER = "lorafleet_expert_order_in_lora_b"

# Honoured below, or by whoever reads the tensors: those, not the text, say which modules are meant.
HONOURED = frozenset({
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("init_lora_weights", "layers_to_transform", "ensure_weight_tying", "use_dora"),
    *("target_parameters", "modules_to_save", EXPERT_ORDER),
    *("target_modules", "exclude_modules", "layers_pattern", "base_model_name_or_path", "peft_version"),
})  # fmt: skip
# They steer training or loading in PEFT and leave no trace in the maths of a finished adapter. The
# *_config ones describe an initialisation, which init_lora_weights alone decides. fan_in_fan_out is about
# layers that keep their weight transposed: PEFT switches it off for all others, and our bases have no such.
# The last three are of older versions of ms-swift, whose own name for the kind of adapter is swift_type.
_HARMLESS = frozenset({
    *("auto_mapping", "inference_mode", "lora_dropout", "megatron_core", "qalora_group_size", "revision"),
    *("runtime_config", "task_type", "corda_config", "eva_config", "lora_ga_config", "loftq_config"),
    *("fan_in_fan_out", "lora_dtype", "lorap_lr_ratio", "lorap_emb_lr"),
})  # fmt: skip
# These inits start training from the unchanged base. Others (pissa, olora, corda, loftq, lora_ga) move part
# of the base into the adapter; PEFT's conversion on saving doubles the rank and writes `true` here.
_PLAIN_INITS = (True, False, None, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class LoraSettings:
    rank: int
    alpha: float
    use_rslora: bool
    use_dora: bool
    ranks: Patterns
    alphas: Patterns
    layers: frozenset[int] | None  # layers_to_transform
    ensure_weight_tying: bool
    base_model: str
    peft_version: str | None
    warnings: tuple[PushWarning, ...]
    target_parameters: tuple[str, ...] = ()
    expert_blocks_in_b: bool = False
    full_heads: frozenset[str] = frozenset()  # of lm_head and embed_tokens: those in modules_to_save
    bias: str = "none"
    targets: frozenset[str] = frozenset()  # target_modules where it is a list; empty where it is a pattern
    narrowed: bool = False  # by exclude_modules or layers_pattern, which are not looked into

    def is_target(self, path: str) -> bool:
        """Whether PEFT gives LoRA to the module at this path of the model, as far as names alone say it."""
        return not self.narrowed and any(tail in self.targets for tail in tails(path))

    def rank_at(self, path: str) -> int:
        """The rank of the module at this path of the model: "model.layers.0.self_attn.q_proj"."""
        return int(self.ranks.lookup(self._target(path), self.rank))

    def scale_at(self, path: str) -> float:
        """alpha / r, or alpha / sqrt(r) when rank-stabilised (arXiv:2312.03732), with the module's own r, in
        float32. Raises InvalidAdapter where that is 0."""
        rank, alpha = self.rank_at(path), self.alphas.lookup(self._target(path), self.alpha)
        scale = float(np.float32(alpha / (math.sqrt(rank) if self.use_rslora else rank)))
        if scale == 0:
            raise InvalidAdapter(f"{CONFIG_FILE}: the scale of {path} is 0 in float32: it would do nothing")
        return scale

    def _target(self, path: str) -> str:
        """PEFT matches a module's weight under the weight's own name where a config asks for that."""
        weight = f"{path}.weight"
        asked = any(f".{weight}".endswith(f".{name}") for name in self.target_parameters)
        return weight if asked else path


def tails(path: str) -> Iterator[str]:
    """PEFT names a module by any end of its path: "q_proj", "self_attn.q_proj", and so on."""
    while path:
        yield path
        path = path.partition(".")[2]


def read_config(folder: Path) -> LoraSettings:
    """Raises InvalidAdapter, naming the field."""
    config = read_json_object(folder / CONFIG_FILE, MAX_CONFIG_BYTES)
    peft_type = config.get("peft_type")
    if not isinstance(peft_type, str) or peft_type.upper() != "LORA":
        raise _refusal("peft_type", f"is {peft_type!r}, only LORA is served")
    _refuse_unserved(config)
    layers = _layers(config.get("layers_to_transform"))
    missing = [key for key in ("r", "lora_alpha") if config.get(key) is None]
    return LoraSettings(
        rank=_rank("r", 8 if config.get("r") is None else config["r"]),
        alpha=_alpha("lora_alpha", 8 if config.get("lora_alpha") is None else config["lora_alpha"]),
        use_rslora=_flag(config, "use_rslora"),
        use_dora=_flag(config, "use_dora"),
        ranks=_patterns(config, "rank_pattern", _rank),
        alphas=_patterns(config, "alpha_pattern", _alpha),
        layers=layers,
        ensure_weight_tying=_flag(config, "ensure_weight_tying"),
        base_model=_text(config, "base_model_name_or_path") or "",
        peft_version=_text(config, "peft_version"),
        target_parameters=_names(config, "target_parameters"),
        full_heads=_full_heads(config),
        bias=str(config.get("bias") or "none"),
        targets=_target_names(config.get("target_modules")),
        narrowed=_is_on(config.get("exclude_modules")) or _is_on(config.get("layers_pattern")),
        expert_blocks_in_b=_choice(config, EXPERT_ORDER, ("interleaved", "blocks")) == "blocks",
        warnings=(*map(_default_used, missing), *_other_task(config)),
    )


def _default_used(key: str) -> PushWarning:
    return PushWarning("DEFAULT_USED", f"{CONFIG_FILE}: {key} is missing, PEFT's default 8 is used")


def _other_task(config: Mapping[str, Any]) -> list[PushWarning]:
    """The tensors of such an adapter have the same names, but its answers are no text: embeddings, say."""
    task = config.get("task_type")
    if task is None or str(task).upper() == "CAUSAL_LM":
        return []
    text = f"{CONFIG_FILE}: task_type is {str(task)[:40]!r}: the adapter was not trained to write text"
    return [PushWarning("OTHER_TASK", text)]


def read_json_object(path: Path, max_bytes: int) -> dict[str, Any]:
    r"""Raises InvalidAdapter, naming the file. A byte order mark is accepted. Half a character (an escape
    such as \ud800 by itself) is not: no message could carry it."""
    try:
        if path.stat().st_size > max_bytes:
            raise InvalidAdapter(f"{path.name} is larger than {max_bytes} bytes")
        if is_pointer_file(path):
            raise InvalidAdapter(f"{path.name} is {WHAT_IT_IS}")
        text = path.read_text(encoding="utf-8-sig")
        content = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(content, ensure_ascii=False).encode()
    except FileNotFoundError as error:
        raise InvalidAdapter(f"{path.name} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidAdapter(f"{path.name} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise InvalidAdapter(f"{path.name} is not a JSON object")
    return content


def _refuse_unserved(config: Mapping[str, Any]) -> None:
    if config.get("init_lora_weights") not in _PLAIN_INITS:
        raise _refusal(
            "init_lora_weights",
            f"is {config['init_lora_weights']!r}: the adapter assumes a changed base. Save it converted "
            "(path_initial_model_for_weight_conversion)",
        )
    if config.get("swift_type") not in (None, "LORA"):
        raise _refusal("swift_type", f"is {str(config['swift_type'])[:40]!r}, only LORA is served")
    # Of a base without biases PEFT saves none, and "all" means "none". Those in a file are refused.
    if config.get("bias") not in (None, False, "none", "all", "lora_only"):
        raise _refusal("bias", f"is {str(config['bias'])[:40]!r}, not none, all or lora_only")
    switched_on = [
        key
        for key in config
        if key not in HONOURED | _HARMLESS | {"bias", "swift_type"} and _is_on(config[key])
    ]
    if switched_on:
        key = switched_on[0]
        raise _refusal(key, f"is {str(config[key])[:80]!r}: this feature is not served")


def _is_on(value: object) -> bool:
    return value not in (None, False, "", [], {})


def _patterns(config: Mapping[str, Any], key: str, check: Any) -> Patterns:
    values = config.get(key) or {}
    if not isinstance(values, dict):
        raise _refusal(key, "is not an object")
    try:
        return Patterns.compile({pattern: check(key, value) for pattern, value in values.items()})
    except BadPattern as error:
        raise _refusal(key, str(error)) from error


def _rank(key: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise _refusal(key, f"has the rank {value!r}, which is not a positive integer")
    return value


def _alpha(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < abs(value) < 1e30:
        raise _refusal(key, f"has the alpha {str(value)[:40]}, which is not a finite number other than 0")
    return float(value)


def _layers(value: object) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    layers = value if isinstance(value, list) else [value]
    if any(type(layer) is not int for layer in layers):
        raise _refusal("layers_to_transform", f"is {value!r}, not layer numbers")
    return frozenset(layers)


def _names(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    values = config.get(key) or []
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise _refusal(key, f"is {str(values)[:80]!r}, not a list of names")
    return tuple(values)


def _target_names(value: object) -> frozenset[str]:
    """What is no list of names promises nothing."""
    names = value if isinstance(value, list) else []
    return frozenset(name for name in names if isinstance(name, str))


def _full_heads(config: Mapping[str, Any]) -> frozenset[str]:
    """PEFT names modules by any end of their path: "embed_tokens", "model.embed_tokens"."""
    heads = frozenset(name.rpartition(".")[2] for name in _names(config, "modules_to_save"))
    for name in sorted(heads - {"lm_head", "embed_tokens"}):
        raise _refusal("modules_to_save", f"has {name[:80]!r}: only lm_head and embed_tokens are served")
    return heads


def _choice(config: Mapping[str, Any], key: str, choices: tuple[str, ...]) -> str:
    value = config.get(key, choices[0])
    if value not in choices:
        raise _refusal(key, f"is {str(value)[:40]!r}, not one of {', '.join(choices)}")
    return str(value)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise _refusal(key, f"is {value!r}, neither true nor false")
    return bool(value)


def _text(config: Mapping[str, Any], key: str) -> str | None:
    value = config.get(key)
    if value is not None and not isinstance(value, str):
        raise _refusal(key, f"is {value!r}, not a string")
    if value is not None and len(value) > _MAX_TEXT_CHARS:
        raise _refusal(key, f"has {len(value)} characters, at most {_MAX_TEXT_CHARS} are taken")
    if value is not None and _CONTROL.search(value):
        raise _refusal(key, f"is {value[:80]!r}, which has control characters")
    return value


def _refusal(field: str, reason: str) -> InvalidAdapter:
    return InvalidAdapter(f"{CONFIG_FILE}: {field} {reason}")


def few(names: Sequence[str], most: int) -> str:
    """The text for a message: the first ones, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
