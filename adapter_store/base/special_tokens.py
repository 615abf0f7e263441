"""The special tokens of a base and those that it adds, by the rules of transformers."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adapter_store.base.config import CONFIG_FILE
from adapter_store.base.fields import Fields
from adapter_store.base.tokenizer_class import default_tokens
from adapter_store.errors import InvalidModel

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"
USUAL_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_LISTED = "added_tokens_decoder"
_MORE = ("extra_special_tokens", "additional_special_tokens")  # the new name of a list, and the old one


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is found in a text before anything else is; as the `tokenizers` library has them."""

    content: str
    special: bool = True
    normalized: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    named: Mapping[str, str]  # as chat templates know them: "bos_token" -> "<s>"
    # What the other files add to tokenizer.json, in this order. What is listed has just this form, even where
    # tokenizer.json has the token in another one; what is only mentioned is a token, in whatever form.
    listed: tuple[AddedToken, ...]
    mentioned: tuple[AddedToken, ...]
    # Ids from here on are none of the model's: what would get one stays plain text. None: not known.
    vocab_size: int | None


def read_special_tokens(folder: Path) -> SpecialTokens:
    """Files that are not there say nothing. Raises InvalidModel, naming the file and the field."""
    config, tokenizer, said = (
        Fields.from_file_if_there(folder / name)
        for name in (CONFIG_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG_FILE)
    )
    values = _values(folder, said)
    defaults = dict(default_tokens(config.values, said.values, folder / TOKENIZER_FILE))
    match tokenizer.values.get("padding"):
        case {"pad_token": str(pad)}:
            defaults.setdefault("pad_token", pad)
    named, more = _named({**defaults, **values}, said.origin), _more(values)
    if _LISTED in said.values:
        listed = _listed(said, {token.content for token in named.values()})
    else:
        listed = _added(folder, tokenizer, {token.content for token in (*named.values(), *more)})
    return SpecialTokens(
        named={name: token.content for name, token in named.items()},
        listed=tuple(token for _, token in sorted(listed.items())),
        mentioned=(*named.values(), *more),
        vocab_size=config.optional_integer("vocab_size"),
    )


def read_token_names(folder: Path) -> tuple[dict[str, str], frozenset[str]]:
    """How chat templates know them, and all that the folder itself mentions; but not the token for padding
    that tokenizer.json alone may name: that file, of many megabytes, is not parsed. Raises InvalidModel."""
    config, said = (Fields.from_file_if_there(folder / name) for name in (CONFIG_FILE, TOKENIZER_CONFIG_FILE))
    defaults = default_tokens(config.values, said.values, folder / TOKENIZER_FILE)
    values = _values(folder, said)
    named = _named({**defaults, **values}, said.origin)
    by_class = {name for name in defaults if values.get(name) is None}
    own = (token for name, token in named.items() if name not in by_class)
    mentioned = frozenset(token.content for token in (*own, *_more(values)))
    return {name: token.content for name, token in named.items()}, mentioned


def added_ids(tokenizer: Fields) -> dict[str, int]:
    """The tokens that tokenizer.json itself adds to its vocabulary. Raises InvalidModel."""
    try:
        return {token["content"]: token["id"] for token in tokenizer.values.get("added_tokens") or []}
    except (KeyError, TypeError) as error:
        raise InvalidModel(f"{tokenizer.origin}: added_tokens is damaged: {error!r}") from error


def _values(folder: Path, said: Fields) -> dict[str, Any]:
    """The values of tokenizer_config.json; in an older folder what the map says wins, null too."""
    if _LISTED in said.values:
        return dict(said.values)
    return _overlaid(said.values, Fields.from_file_if_there(folder / SPECIAL_TOKENS_FILE).values)


def _overlaid(values: Mapping[str, Any], special: Mapping[str, Any]) -> dict[str, Any]:
    over = {name: value for name, value in special.items() if name not in _MORE}
    more = [name for name in _MORE if special.get(name)]
    if more and not any(values.get(name) for name in _MORE):
        over[more[0]] = special[more[0]]
    return {**values, **over}


def _named(values: Mapping[str, Any], origin: str) -> dict[str, AddedToken]:
    """The usual names first, then those of this model alone: image_token and the like."""
    named: dict[str, AddedToken] = {}
    for name in USUAL_NAMES:
        if values.get(name) is not None:
            token = _token(values[name])
            if token is None:
                raise InvalidModel(f"{origin}: {name} must be a token, not {values[name]!r}")
            named[name] = token
    own = {name: value for name, value in values.items() if name.endswith("_token")}
    extra = values.get(_MORE[0])
    for name, value in {**own, **(extra if isinstance(extra, dict) else {})}.items():
        token = _token(value)
        if name not in named and name not in USUAL_NAMES and token is not None:
            named[name] = token
    return named


def _more(values: Mapping[str, Any]) -> list[AddedToken]:
    lists = (value for name in _MORE if isinstance(value := values.get(name), list) and value)
    return [token for value in next(lists, []) if (token := _token(value)) is not None]


def _token(value: Any, *, special: bool = True) -> AddedToken | None:
    """A token is written as a string, or as an object with its content and form."""
    match value:
        case str(content):
            return AddedToken(content)
        case {"content": str(content)}:
            form = {name: value.get(name) is True for name in ("single_word", "lstrip", "rstrip")}
            return AddedToken(content, special, value.get("normalized", not special) is True, **form)
    return None


def _listed(said: Fields, named: Collection[str]) -> dict[int, AddedToken]:
    """The tokens of tokenizer_config.json's added_tokens_decoder, by their ids."""
    listed: dict[int, AddedToken] = {}
    try:
        for token_id, value in said.values[_LISTED].items():
            token = _token(value, special=value.get("special") is True)
            if token is None:
                raise ValueError(f"{value!r} is no token")
            listed[int(token_id)] = replace(token, special=token.special or token.content in named)
    except (AttributeError, TypeError, ValueError) as error:
        raise said.wrong(_LISTED, f"an object of tokens by their ids ({error})") from error
    return listed


def _added(folder: Path, tokenizer: Fields, special: Collection[str]) -> dict[int, AddedToken]:
    """Tokens of added_tokens.json, which lists them without their form, but for those of tokenizer.json."""
    said, there = Fields.from_file_if_there(folder / ADDED_TOKENS_FILE), added_ids(tokenizer).values()
    if not all(type(token_id) is int for token_id in said.values.values()):
        raise InvalidModel(f"{said.origin} must give each token an id")
    return {
        token_id: AddedToken(content, content in special, normalized=content not in special)
        for content, token_id in said.values.items()
        if token_id not in there
    }
