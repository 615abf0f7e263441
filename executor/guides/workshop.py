"""Guides are made on threads of their own: a grammar, and many outputs, may take a while."""

import os
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

from llguidance import LLMatcher, LLTokenizer

from executor.batch.sequence import Sequence
from executor.errors import ConstraintFailed
from executor.guides.guide import Guide, Vocabulary
from lorafleet.constraints.constraint import Constraint
from lorafleet.constraints.grammar import InvalidConstraint, matcher_of

# A grammar's matcher takes up to 40 MB when it has seen much; at the beginning of an answer less than one.
MOST_GRAMMARS = 64
_MOST_THREADS = 4


@dataclass(frozen=True, slots=True)
class Made:
    """The guide of a sequence that has waited for it. `failure` says why there is no guide."""

    sequence: Sequence
    guide: Guide | None
    failure: Exception | None = None


class Workshop:
    """`tokenizer` None: constraints are not known. `wake` is called on other threads when `made` has news.

    All methods are for one thread. Matchers at the beginning of answers are kept by constraint, those that
    were asked for last: an answer begins with a copy. So the same constraint is compiled once, also for many
    that come at the same time.
    """

    def __init__(
        self, tokenizer: LLTokenizer | None, vocabulary: Vocabulary, wake: Callable[[], None]
    ) -> None:
        self._tokenizer = tokenizer
        self.vocabulary = vocabulary
        self._wake = wake
        self._pool = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "guides")
        self._grammars: OrderedDict[Constraint, Future[LLMatcher]] = OrderedDict()
        self._made: SimpleQueue[Made] = SimpleQueue()

    @property
    def knows_constraints(self) -> bool:
        return self._tokenizer is not None

    def make(self, sequence: Sequence, constraint: Constraint) -> None:
        """`made` will have it."""
        compiled = self._grammars.get(constraint)
        if compiled is None:
            compiled = self._grammars[constraint] = self._pool.submit(self._compile, constraint)
            if len(self._grammars) > MOST_GRAMMARS:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(constraint)
        if compiled.done():
            self._pool.submit(self._follow, sequence, compiled)
        else:
            compiled.add_done_callback(partial(self._follow, sequence))

    def made(self) -> list[Made]:
        """Since the last call."""
        found = []
        try:
            while True:
                found.append(self._made.get_nowait())
        except Empty:
            return found

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _compile(self, constraint: Constraint) -> LLMatcher:
        if self._tokenizer is None:
            raise ConstraintFailed("this executor knows no constraints")
        try:
            matcher = matcher_of(self._tokenizer, constraint)
        except InvalidConstraint as error:
            raise ConstraintFailed(f"constraint: {error}") from error
        matcher.compute_bitmask()  # The first one takes longest, and every copy has its work.
        return matcher

    def _follow(self, sequence: Sequence, compiled: "Future[LLMatcher]") -> None:
        """On whatever thread has compiled it, or one of the pool."""
        if compiled.cancelled():
            return
        try:
            guide = Guide(sequence.dispatch, self.vocabulary, compiled.result().deep_copy())
            self._made.put(Made(sequence, guide))
        except Exception as error:
            self._made.put(Made(sequence, None, error))
        self._wake()
