"""The names by which schedulers ask for a version, for the metrics that list names. Pure."""

from collections import OrderedDict

# Each takes some two hundred bytes, and an executor has far fewer slots and sequences that wait.
MAX_VERSIONS = 8192
# Those of one content: each is a part of one label.
MAX_NAMES = 8


class AdapterNames:
    """The last names ("tenant/name") of the versions that were asked for last.

    They decide nothing: an executor runs and keeps versions by their digests.
    """

    def __init__(self) -> None:
        self._names: OrderedDict[str, tuple[str, ...]] = OrderedDict()  # The last name is the newest.

    def told(self, digest: str, name: str) -> None:
        """A scheduler asked for the version by this name. Nothing where one of them is empty: for the base
        model, and from a scheduler that tells no names."""
        if not digest or not name:
            return
        others = (other for other in self._names.get(digest, ()) if other != name)
        self._names[digest] = (*others, name)[-MAX_NAMES:]
        self._names.move_to_end(digest)
        if len(self._names) > MAX_VERSIONS:
            self._names.popitem(last=False)

    def of(self, digest: str) -> tuple[str, ...]:
        """In alphabetical order; the digest itself where no name was told. From any thread."""
        return tuple(sorted(self._names.get(digest, (digest,))))
