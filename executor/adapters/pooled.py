"""Loads adapters on one rank: from the store into the host pool, and from there into slots."""

import logging
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from adapter_store import Weights, WeightsSource
from executor.adapters.host_pool import HostPool, Region
from executor.adapters.layout_workers import LayoutWorkers
from executor.adapters.slot_writer import SlotWriter
from executor.lora.dora import DoRAFactors
from executor.lora.full_heads import FullHeads, check_full_heads
from executor.lora.image import NUMPY_DTYPES, Buffer, SlotImage, build_slot_image, copy_into
from executor.lora.layout import SlotLayout

logger = logging.getLogger(__name__)
EXTRA_ALIGNMENT = 256  # of each part of a region


@dataclass(frozen=True, slots=True)
class PooledImage:
    """One region holds all of it: the image's block, then DoRA's factors, then full heads."""

    image: SlotImage
    region: Region
    factors: Tensor | None
    full_heads: Mapping[str, Tensor]  # by name, [vocab, hidden]

    @property
    def nbytes(self) -> int:
        return self.region.array.nbytes

    @property
    def num_full_heads(self) -> int:
        return len(self.full_heads)


class PooledAdapters:
    """What a pager needs on one rank. `load_image` runs on loader threads, all else on the engine's."""

    def __init__(
        self,
        store: WeightsSource,
        layout: SlotLayout,
        pool: HostPool,
        writer: SlotWriter,
        dora: DoRAFactors | None = None,
        full_heads: FullHeads | None = None,
        workers: LayoutWorkers | None = None,
    ) -> None:
        """Adapters that need what is not given are refused. `workers` read the same store."""
        self._store = store
        self._workers = workers
        self._dora = dora
        self._full_heads = full_heads
        self._layout = layout
        self._pool = pool
        self._writer = writer
        self.nbytes_per_slot = max_nbytes(layout.max_block_bytes, dora, full_heads)

    @property
    def max_images(self) -> int:
        return self._pool.max_images

    def slot_nbytes(self, num_full_heads: int) -> int:
        """A stripe is as for the highest rank, whatever the adapter's; full heads are only where needed."""
        head_bytes = self._full_heads.nbytes if self._full_heads else 0
        factor_bytes = self._dora.nbytes if self._dora else 0
        return self._layout.max_block_bytes + factor_bytes + num_full_heads * head_bytes

    def load_image(self, digest: str) -> PooledImage:
        """Room is claimed once the adapter is known to be whole and to fit: what cannot be served pushes out
        nothing. Raises what `open` and `build_slot_image` raise, FullHeadNotServed, and HostMemoryFull."""
        pooled = self._from_workers(digest) or self._load_here(digest)
        if pooled.image.error:
            logger.info("quantized, relative error %.4f", pooled.image.error, extra={"digest": digest})
        return pooled

    def _from_workers(self, digest: str) -> PooledImage | None:
        """None: not from there."""
        if self._workers is None:
            return None
        with self._workers.image(digest, self._layout) as image:
            if image is None:
                return None
            region = self._pool.claim(digest, image.nbytes)
            np.copyto(region.array, image.block.numpy())  # lets go of the interpreter
        return PooledImage(replace(image, block=torch.from_numpy(region.array)), region, None, {})

    def _load_here(self, digest: str) -> PooledImage:
        with self._store.open(digest) as weights:
            check_full_heads(weights, self._full_heads)
            loading = _Loading(digest, weights, self._pool, self._dora, self._full_heads)
            try:
                image = build_slot_image(
                    weights, self._layout, loading.allocate, with_dora=self._dora is not None
                )
                return loading.pooled(image)
            except BaseException:
                if loading.region is not None:
                    self._pool.release(loading.region)
                raise

    def load(self, slot: int, image: PooledImage) -> None:
        extra = self._dora.enter(slot, image.factors) if self._dora else []
        if self._full_heads:
            extra += self._full_heads.enter(slot, image.full_heads)
        image.region.copied = self._writer.load(slot, image.image, extra)

    def clear(self, slot: int) -> None:
        extra = self._dora.clear(slot) if self._dora else []
        if self._full_heads:
            extra += self._full_heads.clear(slot)
        self._writer.clear(slot, extra)

    def load_seconds(self) -> list[float]:
        return self._writer.load_seconds()

    def forget(self, image: PooledImage) -> None:
        """The host tier has given it up."""
        self._pool.release(image.region)

    def make_room(self, keep: Container[str], evict: Callable[[], bool]) -> None:
        self._pool.serve(keep, evict)

    def close(self) -> None:
        self._pool.close()
        if self._workers is not None:
            self._workers.close()


@dataclass(slots=True)
class _Loading:
    """One adapter on its way into a region."""

    digest: str
    weights: Weights
    pool: HostPool
    dora: DoRAFactors | None
    full_heads: FullHeads | None
    region: Region | None = None
    factors: Tensor | None = None
    parts: list[Buffer] = field(default_factory=list)  # of the region

    def allocate(self, nbytes: int) -> Buffer:
        """The room for the image's block; what comes behind it is sized here, too."""
        self.factors = self.dora.of(self.digest, self.weights) if self.dora else None
        head_bytes = self.full_heads.nbytes if self.full_heads else 0
        heads = [head_bytes] * len(self.weights.full_heads)
        sizes = [nbytes, self.factors.nbytes if self.factors is not None else 0, *heads]
        ends = list(accumulate(map(_aligned, sizes), initial=0))
        self.region = region = self.pool.claim(self.digest, ends[-1] if sum(sizes[1:]) else nbytes)
        self.parts = [region.array[start : start + size] for start, size in zip(ends, sizes, strict=False)]
        return self.parts[0]

    def pooled(self, image: SlotImage) -> PooledImage:
        """Raises NonFiniteWeights."""
        if self.region is None:
            raise RuntimeError("an image was built without memory")
        factors = None
        if self.factors is not None:
            factors = torch.from_numpy(self.parts[1]).view(torch.float32)
            factors.copy_(self.factors)
        heads = {}
        if self.full_heads:
            dtype = self.full_heads.dtype
            for part, (name, head) in zip(self.parts[2:], self.weights.full_heads.items(), strict=True):
                copy_into(part.view(NUMPY_DTYPES[dtype]).reshape(head.shape), head, f"{name}.weight")
                heads[name] = torch.from_numpy(part).view(dtype).view(head.shape)
        return PooledImage(image, self.region, factors, heads)


def max_nbytes(block_bytes: int, dora: DoRAFactors | None, full_heads: FullHeads | None) -> int:
    """What an adapter takes at most: an image's block, and all that may come with it."""
    heads = min(2, full_heads.number) * _aligned(full_heads.nbytes) if full_heads else 0
    return _aligned(block_bytes) + (_aligned(dora.nbytes) if dora else 0) + heads


def _aligned(nbytes: int) -> int:
    return -(-nbytes // EXTRA_ALIGNMENT) * EXTRA_ALIGNMENT
