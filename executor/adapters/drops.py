"""Which versions are to be freed, and who waits to hear that they are. Pure."""

from collections.abc import Callable, Iterator

DropKey = tuple[int, int]  # number of a stream, and the scheduler's own number of the drop


class Drops:
    """A version is in here from its drop until no copy of it is left in memory, and none is under way.

    `discard` frees its copy on disk, and calls for `discarded` when it is done; None: there are none.
    """

    def __init__(self, discard: Callable[[str], None] | None) -> None:
        self._discard = discard
        self._waiting: dict[str, list[DropKey]] = {}
        self._discarding: dict[str, list[DropKey]] = {}
        self._done: list[DropKey] = []

    def __contains__(self, digest: object) -> bool:
        return digest in self._waiting

    def add(self, digest: str, key: DropKey | None) -> None:
        """None: nobody asks for the answer."""
        self._waiting.setdefault(digest, []).extend([key] if key else [])

    def keep(self, digest: str, key: DropKey | None = None) -> None:
        """It is pinned: what was to be done is done."""
        self._done += [*self._waiting.pop(digest, ()), *([key] if key else ())]

    def freed(self, digest: str) -> None:
        """In memory. From here on it may be loaded again as any other."""
        if digest not in self._waiting:
            return
        keys = self._waiting.pop(digest)
        if self._discard is None:
            self._done += keys
            return
        self._discarding.setdefault(digest, []).extend(keys)
        self._discard(digest)

    def discarded(self, digest: str) -> None:
        """On disk, and what is left there has been told."""
        self._done += self._discarding.pop(digest, ())

    def take_done(self) -> Iterator[DropKey]:
        """Those that were done since the last call."""
        done, self._done = self._done, []
        return iter(done)
