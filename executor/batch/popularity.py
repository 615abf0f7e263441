"""How much each version is used, recent uses counting more. Pure: its clock is the number of uses."""

from math import inf, log2


class Popularity:
    """Decayed counts: the weight of a use halves with every `half_life` uses of any versions that follow.

    It holds logarithms of the counts, as of use 0, before which all would have been larger alike: so they
    compare at any time, and a use touches one of them. Of the `max_versions` that it remembers, the least
    recently used is forgotten first.
    """

    def __init__(self, half_life: float, max_versions: int) -> None:
        self._half_life = half_life
        self._max_versions = max_versions
        self._uses = 0
        self._weights: dict[str, float] = {}  # ordered: the least recently used first

    def __len__(self) -> int:
        return len(self._weights)

    def use(self, digest: str) -> None:
        self._uses += 1
        age = self._uses / self._half_life
        before = self._weights.pop(digest, -inf)
        self._weights[digest] = age + log2(2.0 ** (before - age) + 1.0)
        if len(self._weights) > self._max_versions:
            del self._weights[next(iter(self._weights))]

    def of(self, digest: str, more: int = 0) -> float:
        """The logarithm (base 2) of its count, up to a summand that all have; -inf for one not remembered.
        `more` uses are counted as if they were now."""
        weight = self._weights.get(digest, -inf)
        if not more:
            return weight
        age = self._uses / self._half_life
        return age + log2(2.0 ** (weight - age) + more)
