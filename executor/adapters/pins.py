"""Which adapters are kept at operators' wish, and in which tier. Pure."""

from collections.abc import Iterator, Mapping

from executor.adapters.residency import Tier


class Pins(Mapping[str, Tier]):
    """The closest tier in which a digest is to be kept. Each adapter with that content has a pin of its own,
    and it is kept while one is left."""

    def __init__(self) -> None:
        self._tiers: dict[str, dict[str, Tier]] = {}  # by digest and adapter, none empty

    def set(self, digest: str, adapter: str, tier: Tier) -> None:
        self._tiers.setdefault(digest, {})[adapter] = tier

    def end(self, digest: str, adapter: str) -> None:
        """Ends the pin of one adapter; nothing when there is none."""
        self._tiers.get(digest, {}).pop(adapter, None)
        if not self._tiers.get(digest):
            self.end_all(digest)

    def end_all(self, digest: str) -> None:
        self._tiers.pop(digest, None)

    def lower(self, digest: str) -> None:
        """Into host memory: it cannot be kept in a slot."""
        self._tiers[digest] = dict.fromkeys(self._tiers[digest], Tier.HOST)

    def __getitem__(self, digest: str) -> Tier:
        return Tier.SLOT if Tier.SLOT in self._tiers[digest].values() else Tier.HOST

    def __iter__(self) -> Iterator[str]:
        return iter(self._tiers)

    def __len__(self) -> int:
        return len(self._tiers)
