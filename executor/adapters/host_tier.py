"""The cache of adapters in host memory: bounded bytes, the least recently used goes first."""

from collections.abc import Callable, Container, Iterator
from typing import Generic, Protocol, TypeVar


class Image(Protocol):
    @property
    def nbytes(self) -> int: ...
    @property
    def num_full_heads(self) -> int:
        """Full heads: they take room of their own beside a slot's."""


ImageT = TypeVar("ImageT", bound=Image)


class HostTier(Generic[ImageT]):
    """`forget` is told every image that leaves."""

    def __init__(self, max_bytes: int, forget: Callable[[ImageT], None] = lambda image: None) -> None:
        self._forget = forget
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._images: dict[str, ImageT] = {}  # ordered: the least recently used first

    def __contains__(self, digest: object) -> bool:
        return digest in self._images

    def __iter__(self) -> Iterator[str]:
        return iter(self._images)

    def size(self, digest: str) -> int:
        return self._images[digest].nbytes

    def use(self, digest: str) -> ImageT:
        """The image, which is now the most recently used. KeyError when it is not here."""
        image = self._images.pop(digest)
        self._images[digest] = image
        return image

    def put(self, digest: str, image: ImageT, keep: Container[str]) -> bool:
        """Enter a new image and evict others for it, but none in `keep`. False: no room, nothing changed."""
        others = [other for other in self._images if other not in keep]
        evictable = sum(self._images[other].nbytes for other in others)
        if self.num_bytes - evictable + image.nbytes > self.max_bytes:
            return False
        while self.num_bytes + image.nbytes > self.max_bytes:
            self.discard(others.pop(0))
        self._images[digest] = image
        self.num_bytes += image.nbytes
        return True

    def discard(self, digest: str) -> None:
        image = self._images.pop(digest, None)
        if image is not None:
            self.num_bytes -= image.nbytes
            self._forget(image)

    def evict(self, keep: Container[str]) -> bool:
        """Discard the least recently used image that is not in `keep`; False when there is none."""
        victim = next((digest for digest in self._images if digest not in keep), None)
        if victim is not None:
            self.discard(victim)
        return victim is not None

    def check(self) -> None:
        """Raise RuntimeError unless the bytes add up and stay in the bound."""
        total = sum(image.nbytes for image in self._images.values())
        if total != self.num_bytes or total > self.max_bytes:
            raise RuntimeError(f"host tier holds {total} bytes, counts {self.num_bytes} of {self.max_bytes}")
