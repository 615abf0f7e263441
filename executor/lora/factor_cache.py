"""DoRA's factors on this machine's disk, by adapter and base.

They are worth keeping: computing them reads all of the base's weights.

<adapter hex>-<first 32 of the base's hex>    sha256 of the rest | float32 values
"""

import contextlib
import hashlib
import logging
import os
import threading
import uuid
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_MAX_FILES = 1024
_HASH_BYTES = 32
_logger = logging.getLogger(__name__)


class FactorCache:
    """Thread-safe, shared by any number of processes. A disk that fails costs the copies, nothing else."""

    def __init__(self, folder: Path, base: Iterable[Tensor]) -> None:
        """`base`: the weights that factors depend on, hashed when the first factors are asked for."""
        self._folder, self._base = folder, tuple(base)
        self._base_digest = ""
        self._lock = threading.Lock()  # guards the digest

    def find(self, digest: str, length: int) -> Tensor | None:
        """The factors of an adapter, float32 [length]; None when there are none, or not whole."""
        path = self._path(digest)
        try:
            content = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        data = content[_HASH_BYTES:]
        if len(data) != 4 * length or hashlib.sha256(data).digest() != content[:_HASH_BYTES]:
            _logger.warning("DoRA factors of %s are damaged: they are computed again", digest)
            return None
        return torch.from_numpy(np.frombuffer(data, "<f4").copy())

    def keep(self, digest: str, factors: Tensor) -> None:
        data = factors.numpy().astype("<f4").tobytes()
        aside = self._folder / f".{uuid.uuid4().hex}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(hashlib.sha256(data).digest() + data)
            aside.rename(self._path(digest))
            self._evict()
        except OSError as error:
            _logger.warning("DoRA factors of %s are not kept: %s", digest, error)
            aside.unlink(missing_ok=True)

    def _evict(self) -> None:
        """Those used longest ago; and what a crash left under a name of its own goes in its turn."""
        files = sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        for path in files[: max(0, len(files) - _MAX_FILES)]:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def _path(self, digest: str) -> Path:
        with self._lock:
            if not self._base_digest:
                self._base_digest = _digest(self._base)
        return self._folder / f"{digest.removeprefix('sha256:')}-{self._base_digest[:32]}"


def _digest(weights: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for weight in weights:
        found.update(f"{weight.dtype} {tuple(weight.shape)}\n".encode())
        found.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()
