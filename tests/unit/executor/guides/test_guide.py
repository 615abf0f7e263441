"""What a guide takes from a mask: bad words and allowed tokens, without a grammar."""

from typing import Any

import numpy as np
import pytest

from executor.batch.sequence import Dispatch
from executor.guides.guide import Guide, Vocabulary
from executor.step.token_masks import Words
from tests.support.engines.driver import greedy

VOCABULARY = Vocabulary(100, frozenset({2}))


def guide(**fields: Any) -> Guide:
    dispatch: Dispatch = greedy("x", [1], **fields)
    return Guide(dispatch, VOCABULARY, None)


def barred(guide: Guide) -> set[int]:
    words: Words = np.full(VOCABULARY.num_words, 0xFFFFFFFF, np.uint32)
    guide.narrow(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: VOCABULARY.size]
    return set(np.flatnonzero(bits == 0).tolist())


def test_the_last_token_of_a_bad_word_is_barred_behind_the_others() -> None:
    held = guide(bad_words=((7,), (5, 6), (31, 32, 33), (32, 40)))
    assert barred(held) == {7}
    for token, wanted in ((5, {7, 6}), (31, {7}), (32, {7, 33, 40}), (9, {7}), (32, {7, 40})):
        held.advance(token)
        assert barred(held) == wanted


@pytest.mark.parametrize("known", range(5))
def test_outputs_of_earlier_attempts_count(known: int) -> None:
    words, outputs = ((3, 4, 5), (4, 9)), (1, 3, 4, 3)
    held, anew = guide(bad_words=words, output_token_ids=outputs[:known]), guide(bad_words=words)
    for token in outputs[:known]:
        anew.advance(token)
    assert barred(held) == barred(anew)
    assert barred(held) == ({5, 9} if known == 3 else set())


def test_only_allowed_tokens_are_left_without_bad_ones() -> None:
    held = guide(allowed_token_ids=(0, 31, 32, 99), bad_words=((31,),))
    assert set(range(100)) - barred(held) == {0, 32, 99}
    assert held.narrows and not held.ended
