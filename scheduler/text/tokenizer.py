"""The served model's tokenizer, from its folder, without transformers."""

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from adapter_store.base.end_tokens import read_end_tokens
from adapter_store.base.fields import Fields
from adapter_store.base.special_tokens import TOKENIZER_CONFIG_FILE, read_special_tokens
from lorafleet.constraints.tokens import read_tokenizer

_LETTERS = string.ascii_letters.encode()


@dataclass(frozen=True, slots=True, eq=False)
class Tokenizer:
    """Text to token ids and back. Safe to use from several threads.

    What takes long is asked of the library for a batch of one: that alone lets go of the interpreter while
    it works, on the calling thread.

    `vocab_size` is one more than the highest id. `eos_token_ids` end an answer. `special_tokens` are the
    strings that chat templates know as bos_token, eos_token and so on; `chat_template` is None when the model
    has none. No token stands for more of a text than `longest_token` characters, or than `most_letters` from
    A to Z and a to z: the longest tokens are of spaces and signs. `texts` has what a token adds to a running
    text where that is whole characters, and None where it is not.
    """

    vocab_size: int
    eos_token_ids: frozenset[int]
    special_tokens: Mapping[str, str]
    chat_template: str | None
    longest_token: int
    most_letters: int
    texts: Mapping[int, str | None]
    _tokenizer: tokenizers.Tokenizer
    _pieces: "_Pieces"

    @classmethod
    def from_folder(cls, path: Path) -> "Tokenizer":
        """Reads tokenizer.json and what is beside it. Raises InvalidTokenizer for the one, InvalidModel for
        the others."""
        tokenizer = read_tokenizer(path)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        pieces = _Pieces.make(tokenizer)
        return cls(
            vocab_size=max(vocabulary.values(), default=-1) + 1,
            eos_token_ids=frozenset(read_end_tokens(path)),
            special_tokens=read_special_tokens(path).named,
            chat_template=_chat_template(path),
            longest_token=max(map(len, vocabulary), default=1),
            most_letters=max(map(_letters, vocabulary), default=0),
            texts=_Texts(pieces),
            _tokenizer=tokenizer,
            _pieces=pieces,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; the usual special tokens (such as BOS) are added unless told not to."""
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def may_have_fewer(self, text: str, tokens: int) -> bool:
        """Whether the text may have fewer than so many tokens, as far as can be said at once."""
        if len(text) // self.longest_token >= tokens:
            return False
        return _letters(text) < tokens * max(1, self.most_letters)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of all of them at once, special tokens left out."""
        [text] = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=True)
        return str(text)

    def token(self, token_id: int) -> str:
        """The token string as the vocabulary writes it."""
        return self._tokenizer.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a running text, in UTF-8: maybe only a part of a character, nothing for
        special tokens and unknown ids. Joined and decoded with errors="replace" they give decode()."""
        piece = self._pieces.of(token_id)
        return piece.encode() if isinstance(piece, str) else piece


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """What tokens add to a text, computed once for each id that occurs: text, or bytes that are none.

    Byte-level vocabularies write each byte as one character of a fixed alphabet; SentencePiece ones write
    unknown bytes as <0xE4>. For all other tokens the decoder is asked, with a plain token before them, so
    that it does not take them for the start of a text and strip their space.
    """

    tokenizer: tokenizers.Tokenizer
    special: frozenset[int]
    byte_level: bool
    byte_fallback: bool
    anchor: int | None
    cache: dict[int, str | bytes] = field(default_factory=dict)

    @classmethod
    def make(cls, tokenizer: tokenizers.Tokenizer) -> "_Pieces":
        decoders = _decoder_types(json.loads(tokenizer.to_str()).get("decoder"))
        added = tokenizer.get_added_tokens_decoder()
        anchor = tokenizer.encode("a", add_special_tokens=False).ids
        return cls(
            tokenizer=tokenizer,
            special=frozenset(token_id for token_id, token in added.items() if token.special),
            byte_level="ByteLevel" in decoders,
            byte_fallback="ByteFallback" in decoders,
            anchor=anchor[-1] if anchor else None,
        )

    def of(self, token_id: int) -> str | bytes:
        piece = self.cache.get(token_id)
        if piece is None:
            piece = self.cache[token_id] = _text_or_bytes(self._compute(token_id))
        return piece

    def _compute(self, token_id: int) -> bytes:
        token = self.tokenizer.id_to_token(token_id)
        if token is None or token_id in self.special:
            return b""
        if self.byte_level:
            return _byte_level_bytes(token)
        if self.byte_fallback and (byte := _fallback_byte(token)) is not None:
            return byte
        before = [] if self.anchor is None else [self.anchor]
        text: str = self.tokenizer.decode([*before, token_id])
        return text.removeprefix(self.tokenizer.decode(before)).encode()


class _Texts(dict[int, str | None]):
    """Filled with the ids that occur; one that is there costs a look into a dictionary."""

    def __init__(self, pieces: _Pieces) -> None:
        self._pieces = pieces

    def __missing__(self, token_id: int) -> str | None:
        piece = self._pieces.of(token_id)
        text = self[token_id] = piece if isinstance(piece, str) else None
        return text


def _text_or_bytes(piece: bytes) -> str | bytes:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return piece


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the rest follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_ALPHABET: Mapping[str, int] = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    if all(char in _BYTE_ALPHABET for char in token):
        return bytes(_BYTE_ALPHABET[char] for char in token)
    return token.encode()  # An added token, written as plain text.


def _fallback_byte(token: str) -> bytes | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return None
    return None


def _decoder_types(decoder: Mapping[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    types = {str(decoder["type"])}
    return types.union(*(_decoder_types(part) for part in decoder.get("decoders", ())))


def _letters(text: str) -> int:
    """How many of the text's characters are from A to Z or a to z."""
    data = text.encode(errors="replace")
    return len(data) - len(data.translate(None, _LETTERS))


def _chat_template(path: Path) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = Fields.from_file_if_there(path / TOKENIZER_CONFIG_FILE).values.get("chat_template")
    if isinstance(template, list):  # Several named ones; "default" is the one for plain conversations.
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None
