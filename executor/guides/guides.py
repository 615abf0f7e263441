"""The guides of an engine's sequences, and the masks of its steps. For the engine's thread."""

from collections.abc import Iterable

from llguidance import LLExecutor

from executor.batch.sequence import Dispatch, Sequence
from executor.errors import InvalidDispatch
from executor.guides.guide import Guide
from executor.guides.workshop import Made, Workshop
from executor.step.token_masks import MaskBuffers, Masks

_ALL = 0xFFFFFFFF


class Guides:
    """The guides of living sequences that have one, each made once: a preempted sequence keeps its
    guide. So there are no more matchers than seats, but for what the workshop keeps."""

    def __init__(self, workshop: Workshop, buffers: MaskBuffers) -> None:
        self._workshop = workshop
        self._buffers = buffers
        self._executor = LLExecutor()
        self._guides: dict[Sequence, Guide] = {}
        self._waiting: set[Sequence] = set()

    @property
    def knows_constraints(self) -> bool:
        return self._workshop.knows_constraints

    def check(self, dispatch: Dispatch) -> None:
        """Raises InvalidDispatch for what no guide can follow here."""
        if dispatch.constraint is not None and not self._workshop.knows_constraints:
            raise InvalidDispatch("constraint is not known to this executor: its hello says so")

    def begin(self, sequence: Sequence) -> None:
        """It is not `ready` until its guide is collected, where that takes a grammar."""
        dispatch = sequence.dispatch
        if dispatch.constraint is not None:
            sequence.ready = False
            self._waiting.add(sequence)
            self._workshop.make(sequence, dispatch.constraint)
        elif dispatch.allowed_token_ids or dispatch.bad_words:
            self._guides[sequence] = Guide(dispatch, self._workshop.vocabulary, None)

    def collect(self) -> list[Made]:
        """What was made since the last call, for those who still wait for it."""
        found = [made for made in self._workshop.made() if made.sequence in self._waiting]
        for made in found:
            self._waiting.remove(made.sequence)
            if made.guide:
                self._guides[made.sequence] = made.guide
                made.sequence.ready = True
        return found

    def of(self, sequence: Sequence) -> Guide | None:
        return self._guides.get(sequence)

    def drop(self, sequence: Sequence) -> None:
        """It has ended."""
        self._guides.pop(sequence, None)
        self._waiting.discard(sequence)

    def advance(self, sequence: Sequence, token_id: int) -> None:
        """Its answer has one more token."""
        if guide := self._guides.get(sequence):
            guide.advance(token_id)

    def guide_any(self, draws: Iterable[Sequence]) -> bool:
        return bool(self._guides) and any(sequence in self._guides for sequence in draws)

    def masks(self, draws: Iterable[Sequence]) -> Masks | None:
        """The masks of a step's draws, by what has landed; None where no one has a guide. Enqueues the
        copy. A guide whose matcher fails over its mask says so."""
        guided = [
            (number, guide)
            for number, sequence in enumerate(draws)
            if (guide := self._guides.get(sequence)) is not None
        ]
        if not guided:
            return None
        words = self._buffers.begin()
        words[: len(guided)] = _ALL
        matchers = [(guide.matcher, row) for row, (_, guide) in enumerate(guided) if guide.matcher]
        if matchers:
            self._executor.unsafe_compute_mask_ptr(matchers, words.ctypes.data, words.strides[0], len(words))
        for row, (_, guide) in enumerate(guided):
            guide.check()
            if guide.narrows:
                guide.narrow(words[row])
        return self._buffers.send(tuple(number for number, _ in guided))

    def close(self) -> None:
        self._workshop.close()
