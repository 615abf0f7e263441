"""Work on all cores: for functions that spend their time where the interpreter is let go (numpy, hashlib)."""

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
    results: dict[int, _Result] = {}
    todo = iter(enumerate(items))  # a step of it is one of the interpreter's: nobody gets an item twice

    def run() -> None:
        for number, item in todo:
            results[number] = work(item)

    with ThreadPoolExecutor(num_threads(), "all-cores") as pool:
        for each in [pool.submit(run) for _ in range(num_threads())]:
            each.result()
    return [results[number] for number in range(len(items))]
