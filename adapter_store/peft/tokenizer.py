"""What a pushed folder says about text: its chat template is kept, changed token ids are refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapter_store.base.special_tokens import read_special_tokens
from adapter_store.errors import InvalidAdapter, InvalidModel
from adapter_store.files.lfs_pointer import WHAT_IT_IS, is_pointer_file
from adapter_store.manifest import PushWarning
from adapter_store.model_spec import ModelSpec
from adapter_store.peft.config import few, read_json_object

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
ADDED_TOKENS_FILE = "added_tokens.json"
_CONFIG_PLACE = f"{TOKENIZER_CONFIG_FILE}: chat_template"
MAX_TEMPLATE_BYTES = 1 << 20
MAX_TOKENIZER_BYTES = 128 << 20
_RULES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_IDS = ("vocab", "merges")  # of tokenizer.json's model, compared one by one
_SHOWN = 5  # of the rules that differ


@dataclass(frozen=True, slots=True)
class PushedTemplate:
    place: str  # the file that has it, and the field
    text: str


def read_chat_template(folder: Path) -> tuple[PushedTemplate | None, list[PushWarning]]:
    """chat_template.jinja, else tokenizer_config.json's chat_template, as transformers reads them.

    It is not tried here: that takes a sandbox, which a scheduler has. Raises InvalidAdapter.
    """
    file = folder / TEMPLATE_FILE
    if file.exists():
        if is_pointer_file(file):
            raise InvalidAdapter(f"{TEMPLATE_FILE} is {WHAT_IT_IS}")
        if file.stat().st_size > MAX_TEMPLATE_BYTES:
            raise InvalidAdapter(f"{TEMPLATE_FILE} is larger than {MAX_TEMPLATE_BYTES} bytes")
        try:
            return _checked(TEMPLATE_FILE, file.read_text(encoding="utf-8")), []
        except (OSError, ValueError) as error:
            raise InvalidAdapter(f"{TEMPLATE_FILE} cannot be read: {error}") from error
    if not (folder / TOKENIZER_CONFIG_FILE).exists():
        return None, []
    match read_json_object(folder / TOKENIZER_CONFIG_FILE, MAX_TOKENIZER_BYTES).get("chat_template"):
        case None:
            return None, []
        case str(template):
            return _checked(_CONFIG_PLACE, template), []
        case dict(named):
            return _default_of(named)
        case [*entries] if all(isinstance(entry, dict) for entry in entries):
            return _default_of({str(entry.get("name")): entry.get("template") for entry in entries})
    raise InvalidAdapter(f"{_CONFIG_PLACE} is neither a string nor a list of named ones")


def _default_of(named: Mapping[str, Any]) -> tuple[PushedTemplate | None, list[PushWarning]]:
    """The template that counts of several: the one for plain conversations; all others are for purposes that
    no request has here."""
    match named.get("default"):
        case str(template):
            return _checked(_CONFIG_PLACE, template), []
        case None if "default" not in named:
            text = f"{_CONFIG_PLACE} has no entry named 'default': chats use the base's template"
            return None, [PushWarning("NO_DEFAULT_TEMPLATE", text)]
    raise InvalidAdapter(f"{_CONFIG_PLACE} has an entry named 'default' whose template is not a string")


def _checked(place: str, template: str) -> PushedTemplate:
    """It stays in manifests, and goes to a worker process with every conversation."""
    if len(template) > MAX_TEMPLATE_BYTES:
        raise InvalidAdapter(f"{place} is larger than {MAX_TEMPLATE_BYTES} characters")
    if not template.strip():
        raise InvalidAdapter(
            f"{place} is empty, which makes every chat an empty prompt: without it, chats use the base's"
        )
    return PushedTemplate(place, template)


def check_tokenizer(folder: Path, spec: ModelSpec) -> list[PushWarning]:
    """Warns of rules that are not the base's. Raises InvalidAdapter, naming file and token, when the folder's
    tokenizer gives other ids.

    A token for padding that the base lacks is none: trainers add one, and no prompt or answer has it.
    """
    tokenizer, added = folder / TOKENIZER_FILE, added_tokens(folder)
    base_file = spec.folder / TOKENIZER_FILE if spec.folder is not None else None
    if not tokenizer.exists() and not added:
        return []
    if base_file is None or not base_file.exists():
        culprit = TOKENIZER_FILE if tokenizer.exists() else next(iter(added.values()))[1]
        raise InvalidAdapter(f"{culprit}: the base model has no {TOKENIZER_FILE} to compare with: remove it")
    if tokenizer.exists() and tokenizer.read_bytes() == base_file.read_bytes() and not added:
        return []
    base = _read_tokenizer(base_file)
    base_ids = {token: i for token, (i, _) in added_tokens(base_file.parent).items()} | _token_ids(base)
    padding = _pad_tokens(folder) - base_ids.keys()
    taken = frozenset(base_ids.values()) if padding else frozenset()
    for token, (token_id, file) in added.items():
        if token not in padding or token_id in taken:
            _check_token(file, token, token_id, base_ids, spec)
    if not tokenizer.exists():
        return []
    ours = _read_tokenizer(tokenizer)
    found = {t: i for t, i in _token_ids(ours).items() if t not in padding or i in taken}
    _compare_tokenizers(ours, found, base, base_ids, spec)
    return _other_rules(ours, base)


def _other_rules(ours: Mapping[str, Any], base: Mapping[str, Any]) -> list[PushWarning]:
    """How text becomes tokens of these ids, and these text."""
    parts = [part for part in _RULES if ours.get(part) != base.get(part)]
    own, bases = ({k: v for k, v in each["model"].items() if k not in _IDS} for each in (ours, base))
    parts += [f"model.{name}" for name in sorted(own.keys() & bases) if own[name] != bases[name]]
    forms, base_forms = ({t["content"]: t for t in each.get("added_tokens") or []} for each in (ours, base))
    parts += [f"token {t!r}" for t in sorted(forms.keys() & base_forms) if forms[t] != base_forms[t]]
    if not parts:
        return []
    text = f"{TOKENIZER_FILE}: {few(parts, _SHOWN)} is another than the base's, which is used"
    return [PushWarning("TOKENIZER_RULES_UNUSED", text)]


def _compare_tokenizers(
    ours: Mapping[str, Any],
    ids: Mapping[str, int],
    base: Mapping[str, Any],
    base_ids: Mapping[str, int],
    spec: ModelSpec,
) -> None:
    for token, token_id in ids.items():
        _check_token(TOKENIZER_FILE, token, token_id, base_ids, spec)
    missing = base_ids.keys() - ids.keys()
    if missing:
        raise InvalidAdapter(
            f"{TOKENIZER_FILE} lacks the base's token {min(missing)!r}: token ids would differ"
        )
    if _merges(ours) != _merges(base):
        raise InvalidAdapter(f"{TOKENIZER_FILE}: model.merges differ from the base's: token ids would differ")


def _check_token(file: str, token: str, token_id: int, base_ids: Mapping[str, int], spec: ModelSpec) -> None:
    if base_ids.get(token) == token_id:
        return
    if token_id >= spec.vocab_size:
        raise InvalidAdapter(
            f"{file}: token {token!r} has id {token_id}, the vocabulary ends at {spec.vocab_size}"
        )
    raise InvalidAdapter(f"{file}: token {token!r} has id {token_id}, in the base {base_ids.get(token)}")


def _read_tokenizer(path: Path) -> dict[str, Any]:
    return read_json_object(path, MAX_TOKENIZER_BYTES)


def _token_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    try:
        vocab = tokenizer["model"]["vocab"]
        # Unigram models list [token, score] pairs in the order of their ids.
        ids = dict(vocab) if isinstance(vocab, dict) else {pair[0]: i for i, pair in enumerate(vocab)}
        return ids | {
            str(token["content"]): int(token["id"]) for token in tokenizer.get("added_tokens") or []
        }
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise InvalidAdapter(f"{TOKENIZER_FILE} is not a tokenizer: {error!r}") from error


def _merges(tokenizer: Mapping[str, Any]) -> list[str]:
    """Old files write a merge as "a b", new ones as ["a", "b"]."""
    merges = tokenizer["model"].get("merges") or []
    return [merge if isinstance(merge, str) else " ".join(map(str, merge)) for merge in merges]


def _pad_tokens(folder: Path) -> frozenset[str]:
    """What the folder pads with, whichever of its files says so: one token or none."""
    try:
        named = read_special_tokens(folder).named
    except InvalidModel as error:
        raise InvalidAdapter(str(error).replace(f"{folder}/", "")) from error
    return frozenset({named["pad_token"]} if "pad_token" in named else ())


def added_tokens(folder: Path) -> dict[str, tuple[int, str]]:
    """Token -> (id, the file that says so), from the two files beside tokenizer.json that may add tokens."""
    added: dict[str, tuple[int, str]] = {}
    try:
        if (folder / TOKENIZER_CONFIG_FILE).exists():
            config = read_json_object(folder / TOKENIZER_CONFIG_FILE, MAX_TOKENIZER_BYTES)
            for token_id, token in (config.get("added_tokens_decoder") or {}).items():
                added[str(token["content"])] = (int(token_id), TOKENIZER_CONFIG_FILE)
        if (folder / ADDED_TOKENS_FILE).exists():
            for token, token_id in read_json_object(folder / ADDED_TOKENS_FILE, MAX_TOKENIZER_BYTES).items():
                added[token] = (int(token_id), ADDED_TOKENS_FILE)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidAdapter(
            f"{TOKENIZER_CONFIG_FILE} or {ADDED_TOKENS_FILE} is damaged: {error!r}"
        ) from error
    return added
