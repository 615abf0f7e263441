"""The adapters of a simulation: their digests, ranks and bytes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from adapter_store.module_names import DENSE_PROJECTIONS

MODULES = frozenset(DENSE_PROJECTIONS)


@dataclass(frozen=True, slots=True)
class Catalog:
    """Adapters by digest. They are numbered as traffic names them."""

    ranks: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, count: int, ranks: Sequence[int], rank_bytes: int) -> "Catalog":
        """`ranks` of the first ones, of the next ones, and so on."""
        chosen = {digest_of(number): ranks[number % len(ranks)] for number in range(count)}
        return cls(chosen, {digest: rank * rank_bytes for digest, rank in chosen.items()})

    @property
    def largest(self) -> int:
        return max(self.sizes.values(), default=1)


def digest_of(number: int) -> str:
    return f"adapter-{number:06d}"
