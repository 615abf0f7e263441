"""The served model's tokens: tokenizer.json with what the files beside it add, and as matchers see it."""

from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

import tokenizers
from llguidance import LLTokenizer

from adapter_store.base.special_tokens import (
    TOKENIZER_FILE,
    AddedToken,
    SpecialTokens,
    read_special_tokens,
)
from adapter_store.files.lfs_pointer import WHAT_IT_IS, is_pointer_file


class InvalidTokenizer(Exception):
    """The folder's tokenizer.json cannot be used; the text names it."""


def read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """The tokenizer as transformers reads it, without padding and truncation. Raises InvalidTokenizer
    for tokenizer.json, InvalidModel for the files beside it."""
    file = folder / TOKENIZER_FILE
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # The library raises plain Exception.
        pointer = file.is_file() and is_pointer_file(file)
        raise InvalidTokenizer(f"{file}: {f'it is {WHAT_IT_IS}' if pointer else error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    _add_tokens(tokenizer, read_special_tokens(folder))
    return tokenizer


def guide_tokenizer(folder: Path, vocab_size: int, end_token_ids: Collection[int]) -> LLTokenizer:
    """The tokens as matchers know them: ids of the model's vocabulary that the tokenizer does not have are
    never allowed, and `end_token_ids`, the model's own, wherever a text is whole. It takes about a second,
    and is shared by all matchers.

    Raises InvalidTokenizer where answers of this model cannot be held to anything, InvalidModel.
    """
    ends = sorted(token_id for token_id in end_token_ids if token_id < vocab_size)
    if not ends:
        raise InvalidTokenizer(f"{folder}: the model has no end-of-sequence token")
    try:
        return LLTokenizer(read_tokenizer(folder).to_str(), n_vocab=vocab_size, eos_token=ends)
    except ValueError as error:
        raise InvalidTokenizer(f"{folder / TOKENIZER_FILE}: {error}") from error


def _add_tokens(tokenizer: tokenizers.Tokenizer, special: SpecialTokens) -> None:
    """What the files beside tokenizer.json add to it."""
    there = tokenizer.get_added_tokens_decoder().values()
    forms = {repr(token) for token in there}
    listed = [token for token in map(_library_token, special.listed) if repr(token) not in forms]
    known = {token.content for token in (*there, *listed)}
    mentioned = {token.content: _library_token(token) for token in special.mentioned}
    for token in (*listed, *(token for content, token in mentioned.items() if content not in known)):
        is_new = tokenizer.token_to_id(token.content) is None
        if special.vocab_size is None or not is_new or tokenizer.get_vocab_size() < special.vocab_size:
            tokenizer.add_tokens([token])


def _library_token(token: AddedToken) -> tokenizers.AddedToken:
    form = asdict(token)
    return tokenizers.AddedToken(form.pop("content"), **form)
