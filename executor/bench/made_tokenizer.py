"""Writes a tokenizer of any size, the same one every time: byte-level BPE with made-up merges."""

import json
import random
from pathlib import Path

from tokenizers import pre_tokenizers

END = "<|end|>"
# Characters of most tokens that another one is put behind, and of that one; some are longer. So one in
# fifteen is of more than ten characters, and real ones are as long.
_MOST_BEFORE, _MOST_GOING_ON = 7, 3
_LONGER = 0.02
_SEED = 28


def write_tokenizer(folder: Path, vocab_size: int) -> int:
    """tokenizer.json; returns the id of its end-of-sequence token, the last one.

    Most tokens are words of small letters with and without a space before, as in real ones; others join
    digits, capitals, and signs.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for first, second in _pairs(vocab_size - 1 - len(alphabet), set(alphabet)):
        vocabulary[first + second] = len(vocabulary)
        merges.append((first, second))
    end = len(vocabulary)
    added = {"id": end, "content": END, "special": True, "normalized": False}
    added |= {"single_word": False, "lstrip": False, "rstrip": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": vocabulary, "merges": merges, "ignore_merges": False}
    told = {
        "version": "1.0", "added_tokens": [added], "model": model, "pre_tokenizer": byte_level,
        "decoder": byte_level,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(told), encoding="utf-8")
    return end


def _pairs(count: int, known: set[str]) -> list[tuple[str, str]]:
    """Each joins two tokens that are there before it, and no two give the same."""
    draw = random.Random(_SEED)
    letters = list("etaoinshrdlucmfwypvbgkqjxz")
    # What words begin with, what they go on with, and how many tokens of a hundred are such.
    kinds = (
        ([*letters, *(f"Ġ{letter}" for letter in letters)], list(letters), 84),
        (list("0123456789"), list("0123456789"), 1),
        (list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), list(letters), 10),
        (list("{}[]:,.-_()/"), list("{}[]:,.-_()/"), 5),
    )
    weights = [weight for _, _, weight in kinds]
    pairs = [("Ġ", letter) for letter in letters]
    known.update("".join(pair) for pair in pairs)
    while len(pairs) < count:
        begins, goes_on, _ = draw.choices(kinds, weights)[0]
        first, second = draw.choice(begins), draw.choice(goes_on)
        whole = first + second
        if whole in known:
            continue
        known.add(whole)
        pairs.append((first, second))
        if len(whole) <= _MOST_BEFORE or draw.random() < _LONGER:
            begins.append(whole)
        if len(whole) <= _MOST_GOING_ON and first in goes_on:
            goes_on.append(whole)
    return pairs
