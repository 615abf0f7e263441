"""Loads of one rank on the CPU, in its own thread and by way of a real process beside it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch

from adapter_store import DiskStore
from executor.adapters.host_pool import HostPool
from executor.adapters.layout_workers import LayoutWorkers
from executor.adapters.pooled import PooledAdapters, PooledImage
from executor.adapters.slot_writer import SlotWriter
from executor.config import ExecutorConfig
from executor.lora.config import LoRAConfig
from executor.lora.dora import DoRAFactors
from executor.lora.image import Buffer
from executor.lora.replace import attach_lora
from executor.models import load_model
from kernels.punica import PunicaWrapperCPU


class ImageRig:
    """`here` and `beside` read one store, with slots of rank 8."""

    def __init__(self, base: Path, store: DiskStore, folder: Path, dtype: torch.dtype) -> None:
        self._served: list[HostPool] = []
        self.pool = HostPool(1 << 22, 1 << 22, self._serve, torch.device("cpu"))
        self._served.append(self.pool)
        model = load_model(base, torch.float32, "cpu")
        self.layout = attach_lora(model, LoRAConfig(2, 8, dtype=dtype), PunicaWrapperCPU(2, 8)).arena.layout
        self.config = ExecutorConfig(model=str(base), store=str(folder), loader_processes=1)
        self.workers = LayoutWorkers(self.config, self.layout.max_block_bytes)
        dora, nowhere = DoRAFactors(model, 2), cast(SlotWriter, None)
        self.here = PooledAdapters(store, self.layout, self.pool, nowhere, dora)
        self.beside = PooledAdapters(store, self.layout, self.pool, nowhere, dora, workers=self.workers)

    @contextmanager
    def new_workers(self, config: ExecutorConfig | None = None) -> Iterator[LayoutWorkers]:
        """`beside` uses these meanwhile."""
        workers = LayoutWorkers(config or self.config, self.layout.max_block_bytes)
        self.beside._workers = workers
        yield workers
        workers.close()
        self.beside._workers = self.workers

    def load(self, adapters: PooledAdapters, digest: str, stale: int = 0) -> tuple[PooledImage, Buffer]:
        """The image without its memory, and a copy of that. The memory held `stale` before."""
        for memory, _ in self.pool._stripes:
            memory.fill_(stale)
        pooled = adapters.load_image(digest)
        assert pooled.image.block.data_ptr() == pooled.region.array.ctypes.data
        block = np.array(pooled.region.array)
        adapters.forget(pooled)
        self.pool.check([])
        return replace(pooled, image=replace(pooled.image, block=torch.empty(0))), block

    def works(self, digest: str) -> bool:
        """Whether a process lays it out."""
        assert self.beside._workers
        with self.beside._workers.image(digest, self.layout) as image:
            return image is not None

    def check_same(self, digest: str) -> None:
        """Bytes between the pieces, and the rest of a last unit, may be anything."""
        (expected, zeros), (_, ones) = (self.load(self.here, digest, stale) for stale in (0, 0xFF))
        (found, block) = self.load(self.beside, digest)
        assert len(block) == len(zeros)
        decided = zeros == ones
        assert decided.mean() > 0.5 and np.array_equal(block[decided], zeros[decided])
        for name in ("slot_layout", "ranks", "scales", "error"):
            assert getattr(found.image, name) == getattr(expected.image, name), name
        assert found.full_heads.keys() == expected.full_heads.keys()
        assert (found.factors is None) == (expected.factors is None)

    def _serve(self) -> None:
        for pool in self._served:
            pool.serve((), lambda: False)
