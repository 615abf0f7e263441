"""What one sequence may draw next, from what its request allows and what it has written so far."""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher

from executor.batch.sequence import Dispatch
from executor.errors import ConstraintFailed
from executor.step.token_masks import WORD_BITS, Words

# Tokens that a matcher takes in one call, which holds the interpreter.
_REPLAYED_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`end_token_ids` are the model's own ends of a sequence."""

    size: int
    end_token_ids: frozenset[int]

    @property
    def num_words(self) -> int:
        return -(-self.size // WORD_BITS)


class Guide:
    """Follows a dispatch from its first output on. `matcher`, at the beginning of an answer, is its own; None
    where there is no constraint. A sequence has one for its whole life, in no more than one thread at once.

    `ended`: the answer is whole, and nothing follows. `failure`: why it cannot go on, or None.
    """

    def __init__(self, dispatch: Dispatch, vocabulary: Vocabulary, matcher: LLMatcher | None) -> None:
        rules = dispatch.stop
        self.matcher = matcher
        self.ended = False
        self.failure: ConstraintFailed | None = None
        self._outputs = 0
        self._min_outputs = rules.min_new_tokens
        self._stops = rules.stop_token_ids if matcher else frozenset[int]()
        self._ends = self._stops | vocabulary.end_token_ids if matcher else self._stops
        allowed = dispatch.allowed_token_ids
        self._allowed = _words_of(allowed, vocabulary.num_words) if allowed else None
        self._bad_words = _BadWords(dispatch.bad_words)
        self._replay(dispatch.output_token_ids)

    @property
    def narrows(self) -> bool:
        """Whether there is more to it than the matcher's mask."""
        more = self._allowed is not None or bool(self._bad_words)
        return more or bool(self._stops) or self._outputs < self._min_outputs

    def advance(self, token_id: int) -> None:
        """The answer has one more token."""
        self._outputs += 1
        self._bad_words.advance(token_id)
        if token_id in self._ends:  # these come where a text is whole, and nowhere else
            self.ended = True
        elif self.matcher:
            self._consume([token_id])
            self.ended = self.failure is None and self.matcher.is_stopped()

    def check(self) -> None:
        """After the matcher has written a mask, which may have been too much for it."""
        if self.matcher and self.matcher.is_error():
            self.failure = _failure_of(self.matcher)

    def narrow(self, words: Words) -> None:
        """Take from a mask, as the matcher has written it, all that the request bars besides."""
        if self._stops and self.matcher:
            (_allow if self.matcher.is_accepting() else _bar)(words, self._stops)
        if self._allowed is not None:
            words &= self._allowed
        _bar(words, self._bad_words.next())
        if self.matcher and self._outputs < self._min_outputs:
            before = words.copy()
            _bar(words, self._ends)
            if not words.any():
                words[:] = before  # it is whole already, and nothing else may follow

    def _replay(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids[:-1]:
            self._bad_words.advance(token_id)
        self._outputs = len(token_ids[:-1])
        for start in range(0, self._outputs if self.matcher else 0, _REPLAYED_AT_ONCE):
            self._consume(list(token_ids[start : min(start + _REPLAYED_AT_ONCE, self._outputs)]))
        if token_ids and not self.failure:
            self.advance(token_ids[-1])

    def _consume(self, token_ids: list[int]) -> None:
        if self.matcher and not self.matcher.consume_tokens(token_ids):
            self.failure = _failure_of(self.matcher)


class _BadWords:
    """Sequences of tokens whose last one is barred where the others are the end of the answer."""

    def __init__(self, words: Collection[tuple[int, ...]]) -> None:
        self._always = frozenset(word[0] for word in words if len(word) == 1)
        self._after: dict[int, list[tuple[int, ...]]] = {}  # by the last token but one
        for word in words:
            if len(word) > 1:
                self._after.setdefault(word[-2], []).append(word)
        self._last: deque[int] = deque(maxlen=max((len(word) - 1 for word in words), default=0))

    def __bool__(self) -> bool:
        return bool(self._always or self._after)

    def advance(self, token_id: int) -> None:
        self._last.append(token_id)

    def next(self) -> frozenset[int]:
        """What is barred now."""
        begun = self._after.get(self._last[-1], ()) if self._last else ()
        if not begun:
            return self._always
        last = tuple(self._last)
        return self._always.union(word[-1] for word in begun if last[1 - len(word) :] == word[:-1])


def _words_of(token_ids: Iterable[int], num_words: int) -> Words:
    words = np.zeros(num_words, np.uint32)
    _allow(words, token_ids)
    return words


def _allow(words: Words, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        words[token_id // WORD_BITS] |= np.uint32(1 << token_id % WORD_BITS)


def _bar(words: Words, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        words[token_id // WORD_BITS] &= np.uint32(~(1 << token_id % WORD_BITS) & 0xFFFFFFFF)


def _failure_of(matcher: LLMatcher) -> ConstraintFailed:
    """Behind this mark stands that the parser's state is left out."""
    told = matcher.get_error().partition("\n<")[0].strip()
    return ConstraintFailed(f"constraint cannot be followed any further: {told}")
