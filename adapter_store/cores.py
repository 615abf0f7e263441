"""Work on all cores: for functions that spend their time where the interpreter is let go (numpy, hashes)."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_MAX_THREADS = 8
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def num_threads() -> int:
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def on_all_cores(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """`work` of each item, in the order of the items. Raises what one of them raised."""
    with ThreadPoolExecutor(num_threads(), "all-cores") as pool:
        return list(pool.map(work, items))
