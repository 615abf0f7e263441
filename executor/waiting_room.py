"""Dispatches that were promised a seat which another took first have the next ones. Pure."""

from bisect import insort

from executor.batch.sequence import Dispatch, Key


class WaitingRoom:
    """In order of age: whose request was accepted first leaves first, then who came first.

    Who is promised seats comes in, nobody else, so it holds a seat's number for each further stream at most.
    """

    def __init__(self) -> None:
        self._line: list[tuple[float, int, Dispatch]] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._line)

    def add(self, dispatch: Dispatch) -> None:
        self._arrivals += 1
        insort(self._line, (dispatch.accepted_at, self._arrivals, dispatch))

    def take(self, count: int) -> list[Dispatch]:
        """The first `count`, or all."""
        taken, self._line = self._line[: max(0, count)], self._line[max(0, count) :]
        return [dispatch for *_, dispatch in taken]

    def discard(self, keys: set[Key]) -> set[Key]:
        """Those of them that were here, and are no more."""
        here = {dispatch.key for *_, dispatch in self._line} & keys
        if here:
            self._line = [entry for entry in self._line if entry[-1].key not in here]
        return here
