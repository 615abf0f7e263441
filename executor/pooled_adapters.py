"""Adapters on one rank: from the store into pinned host memory, and from there into slots."""

import logging
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from torch import Tensor

from adapter_store import WeightsSource
from executor.host_pool import HostPool, Region
from executor.lora.dora import DoRAFactors
from executor.lora.image import Buffer, SlotImage, build_slot_image
from executor.lora.layout import SlotLayout
from executor.slot_writer import SlotWriter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PooledImage:
    image: SlotImage
    region: Region
    factors: Mapping[int, Tensor]  # of a DoRA adapter: a thousandth of the image, and not counted

    @property
    def nbytes(self) -> int:
        return self.image.nbytes


class PooledAdapters:
    """What a pager needs on one rank. `load_image` runs on loader threads, all else on the engine's."""

    def __init__(
        self,
        store: WeightsSource,
        layout: SlotLayout,
        pool: HostPool,
        writer: SlotWriter,
        dora: DoRAFactors | None = None,
    ) -> None:
        """Without `dora`, adapters that need its factors are refused."""
        self._store = store
        self._dora = dora
        self._layout = layout
        self._pool = pool
        self._writer = writer
        self.nbytes_per_slot = layout.max_block_bytes

    @property
    def max_images(self) -> int:
        return self._pool.max_images

    def load_image(self, digest: str) -> PooledImage:
        """Room is claimed once the adapter is known to be whole and to fit: what cannot be served pushes out
        nothing. Raises what `open` and `build_slot_image` raise, and HostMemoryFull."""
        regions: list[Region] = []

        def allocate(nbytes: int) -> Buffer:
            regions.append(self._pool.claim(digest, nbytes))
            return regions[0].array

        try:
            with self._store.open(digest) as weights:
                image = build_slot_image(weights, self._layout, allocate, with_dora=self._dora is not None)
                factors = self._dora.of(digest, weights) if self._dora else {}
        except BaseException:
            for region in regions:
                self._pool.release(region)
            raise
        if image.error:
            logger.info("quantized, relative error %.4f", image.error, extra={"digest": digest})
        return PooledImage(image, regions[0], factors)

    def load(self, slot: int, image: PooledImage) -> None:
        image.region.copied = self._writer.load(slot, image.image)
        if self._dora:
            self._dora.enter(slot, image.factors)

    def clear(self, slot: int) -> None:
        self._writer.clear(slot)
        if self._dora:
            self._dora.clear(slot)

    def load_seconds(self) -> list[float]:
        return self._writer.load_seconds()

    def forget(self, image: PooledImage) -> None:
        """The host tier has given it up."""
        self._pool.release(image.region)

    def make_room(self, keep: Container[str], evict: Callable[[], bool]) -> None:
        self._pool.serve(keep, evict)

    def close(self) -> None:
        self._pool.close()
