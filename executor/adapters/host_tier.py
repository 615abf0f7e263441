"""The cache of adapters in host memory: bounded bytes, the least used for its bytes goes first.

A use is a page-in: what stays in its slot needs no copy here. Entering counts as the first one, so that what
came by a hint is not pushed out by what comes next; until its page-in it counts for as many uses as the hint
expects, too.
"""

from collections.abc import Callable, Container, Iterator
from math import log2
from typing import Generic, Protocol, TypeVar

from executor.batch.popularity import Popularity

_HALF_LIFE = 16  # uses, for each image of the largest size; as executor/batch/slots.py has it
_MAX_REMEMBERED = 4096  # versions
_MAX_EXPECTED = 256  # versions


class Image(Protocol):
    @property
    def nbytes(self) -> int: ...
    @property
    def num_full_heads(self) -> int:
        """Full heads: they take room of their own beside a slot's."""


ImageT = TypeVar("ImageT", bound=Image)


class HostTier(Generic[ImageT]):
    """`forget` is told every image that leaves; `largest` is the size of the largest, in bytes."""

    def __init__(
        self, max_bytes: int, largest: int, forget: Callable[[ImageT], None] = lambda image: None
    ) -> None:
        self._forget = forget
        self._popularity = Popularity(_HALF_LIFE * max(1, max_bytes // largest), _MAX_REMEMBERED)
        self._entered: set[str] = set()  # and not used since
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._images: dict[str, ImageT] = {}
        self._expected: dict[str, tuple[int, float]] = {}  # so many uses, until when
        self._changed: set[str] = set()

    def __contains__(self, digest: object) -> bool:
        return digest in self._images

    def __iter__(self) -> Iterator[str]:
        return iter(self._images)

    def size(self, digest: str) -> int:
        return self._images[digest].nbytes

    def use(self, digest: str) -> ImageT:
        """The image, for a page-in. KeyError when it is not here."""
        image = self._images[digest]
        if digest not in self._entered:
            self._popularity.use(digest)
        self._entered.discard(digest)
        self._expected.pop(digest, None)
        return image

    def expect(self, digest: str, uses: int, until: float) -> None:
        """So many requests will come for it, about, whether it is here by now or not. Of too many such the
        one that is expected for the shortest time is forgotten."""
        self._expected[digest] = uses, until
        if len(self._expected) > _MAX_EXPECTED:
            del self._expected[min(self._expected, key=lambda each: self._expected[each][1])]

    def lapse(self, now: float) -> None:
        """Nobody came for what was expected until now."""
        for digest in [each for each, (_, until) in self._expected.items() if until < now]:
            del self._expected[digest]

    def put(self, digest: str, image: ImageT, keep: Container[str]) -> bool:
        """Enter a new image and evict others for it, but none in `keep`. False: no room, nothing changed."""
        evictable = sum(other.nbytes for name, other in self._images.items() if name not in keep)
        if self.num_bytes - evictable + image.nbytes > self.max_bytes:
            return False
        while self.num_bytes + image.nbytes > self.max_bytes:
            self.evict(keep)
        self._images[digest] = image
        self.num_bytes += image.nbytes
        self._entered.add(digest)
        self._changed.add(digest)
        self._popularity.use(digest)
        return True

    def discard(self, digest: str) -> None:
        image = self._images.pop(digest, None)
        self._entered.discard(digest)
        if image is not None:
            self.num_bytes -= image.nbytes
            self._changed.add(digest)
            self._forget(image)

    def evict(self, keep: Container[str]) -> bool:
        """Discard the least used image, for its bytes, that is not in `keep`; False when there is none."""
        others = (digest for digest in self._images if digest not in keep)
        victim = min(others, key=self._worth, default=None)
        if victim is not None:
            self.discard(victim)
        return victim is not None

    def take_changed(self) -> set[str]:
        """The adapters whose images came or went since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def _worth(self, digest: str) -> float:
        expected, _ = self._expected.get(digest, (0, 0.0))
        return self._popularity.of(digest, expected) - log2(self._images[digest].nbytes)

    def check(self) -> None:
        """Raise RuntimeError unless the bytes add up and stay in the bound."""
        total = sum(image.nbytes for image in self._images.values())
        if total != self.num_bytes or total > self.max_bytes:
            raise RuntimeError(f"host tier holds {total} bytes, counts {self.num_bytes} of {self.max_bytes}")
