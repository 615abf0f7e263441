"""Compiles kernels in parallel processes, which all others then find in Triton's cache folder."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from typing import Any


def in_processes(job: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
    """job(*arguments[i]) for all i, in fresh processes: CUDA does not survive a fork. Raises as jobs do."""
    workers = min(len(arguments), max(1, (os.cpu_count() or 2) - 2))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.starmap(job, arguments, chunksize=1)
