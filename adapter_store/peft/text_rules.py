"""What a pushed folder says about text beside its template: honoured for its requests, or warned of."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from adapter_store.base.end_tokens import GENERATION_FILE, read_end_tokens, read_vocabulary
from adapter_store.base.fields import Fields
from adapter_store.base.special_tokens import SPECIAL_TOKENS_FILE, read_token_names
from adapter_store.errors import InvalidAdapter, InvalidModel
from adapter_store.manifest import PushWarning, TextRules
from adapter_store.model_spec import ModelSpec
from adapter_store.peft.config import few, read_json_object
from adapter_store.peft.tokenizer import MAX_TOKENIZER_BYTES, TOKENIZER_CONFIG_FILE, added_tokens

# Every request of the adapter carries its ends, and every conversation its special tokens.
_MAX_ENDS = 64
_MAX_SPECIAL_TOKENS = 64
_NAME = re.compile(r"[a-z][a-z0-9_]{0,57}_token")  # what a template can say, of special tokens
_SHOWN, _SHOWN_CHARS = 3, 80  # of unknown tokens
# A prompt or an answer has none of it.
_PADDING = "pad_token"
# Of generation_config.json, what would change answers. Here requests say it, or leave it at our defaults.
_DRAWING = (
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("repetition_penalty", "no_repeat_ngram_size", "encoder_repetition_penalty", "length_penalty"),
    *("num_beams", "max_new_tokens", "min_new_tokens", "min_length", "stop_strings", "bad_words_ids"),
    *("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
    *("sequence_bias", "guidance_scale", "exponential_decay_length_penalty", "penalty_alpha"),
)
# Of tokenizer_config.json, what would change a prompt's tokens or an answer's text.
_TOKENIZING = (
    *("add_bos_token", "add_eos_token", "add_prefix_space", "split_special_tokens"),
    "clean_up_tokenization_spaces",
)


def read_text_rules(folder: Path, spec: ModelSpec) -> tuple[TextRules, list[PushWarning]]:
    """What is honoured is what the folder names and the base does otherwise. The base's ends stay ends.

    Raises InvalidAdapter, naming the file and the field.
    """
    if spec.folder is None:
        return TextRules(), []
    try:
        generation, config, special = (
            _fields(folder, name) for name in (GENERATION_FILE, TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE)
        )
        ends = generation.token_ids("eos_token_id")
        named, mentioned = read_token_names(folder)
    except InvalidModel as error:
        raise InvalidAdapter(str(error).replace(f"{folder}/", "")) from error
    warnings = _unused(config, generation, spec.folder)
    if not (generation.values or config.values or special.values):
        return TextRules(), warnings
    said = {name for values in (config.values, special.values) for name in values if values[name] is not None}
    base, base_mentioned = read_token_names(spec.folder)
    other = {
        name: token
        for name, token in named.items()
        if name in said and token != base.get(name) and name != _PADDING and _NAME.fullmatch(name)
    }
    new = mentioned - base_mentioned - {named.get(_PADDING)}
    ids = _base_ids(spec.folder) if other or new else {}  # only where it is needed: it is large
    own = _bounded({name: token for name, token in other.items() if token in ids})
    if "eos_token" in own:
        ends = (*ends, ids[own["eos_token"]])
    warnings += _unknown(sorted(new - ids.keys()))
    return TextRules(_own_ends(ends, spec.folder, spec.vocab_size), tuple(sorted(own.items()))), warnings


def _base_ids(base: Path) -> dict[str, int]:
    """The ids of all tokens, whichever of its files adds them."""
    return {token: token_id for token, (token_id, _) in added_tokens(base).items()} | read_vocabulary(base)


def _bounded(own: Mapping[str, str]) -> Mapping[str, str]:
    if len(own) > _MAX_SPECIAL_TOKENS:
        raise InvalidAdapter(
            f"{TOKENIZER_CONFIG_FILE}: {len(own)} special tokens are others than the base's, at most "
            f"{_MAX_SPECIAL_TOKENS} may be"
        )
    return own


def _own_ends(ends: Iterable[int], base: Path, vocab_size: int) -> tuple[int, ...]:
    own = sorted({*ends} - {*read_end_tokens(base)})
    if own and own[-1] >= vocab_size:
        raise InvalidAdapter(
            f"{GENERATION_FILE}: eos_token_id has {own[-1]}, the vocabulary ends at {vocab_size}"
        )
    if len(own) > _MAX_ENDS:
        raise InvalidAdapter(
            f"{GENERATION_FILE}: eos_token_id has {len(own)} ends beside the base's, at most "
            f"{_MAX_ENDS} are taken"
        )
    return tuple(own)


def _unknown(tokens: Iterable[str]) -> list[PushWarning]:
    names = [repr(token[:_SHOWN_CHARS]) for token in tokens]
    if not names:
        return []
    text = f"{few(names, _SHOWN)} is a special token, and none of the base's tokenizer"
    return [PushWarning("UNKNOWN_SPECIAL_TOKEN", f"{TOKENIZER_CONFIG_FILE}: {text}: it stays plain text")]


def _fields(folder: Path, name: str) -> Fields:
    """Without the file, an object without fields. Raises InvalidAdapter."""
    there = (folder / name).exists()
    return Fields(read_json_object(folder / name, MAX_TOKENIZER_BYTES) if there else {}, name)


def _unused(config: Fields, generation: Fields, base: Path) -> list[PushWarning]:
    warnings = []
    bases = Fields.from_file_if_there(base / GENERATION_FILE).values
    if names := _others(generation.values, bases, _DRAWING):
        text = f"{GENERATION_FILE}: {', '.join(names)} is not used: requests say how tokens are drawn"
        warnings.append(PushWarning("GENERATION_CONFIG_UNUSED", text))
    bases = {"add_eos_token": False, **Fields.from_file_if_there(base / TOKENIZER_CONFIG_FILE).values}
    names = [name for name in _others(config.values, bases, _TOKENIZING) if name in bases]
    if names:
        text = f"{TOKENIZER_CONFIG_FILE}: {', '.join(names)} is another than the base's, which is used"
        warnings.append(PushWarning("TOKENIZER_RULES_UNUSED", text))
    return warnings


def _others(ours: Mapping[str, Any], bases: Mapping[str, Any], names: tuple[str, ...]) -> list[str]:
    return [name for name in names if ours.get(name) is not None and ours[name] != bases.get(name)]
