"""Runs work on all cores, for functions that mostly let go of the interpreter (numpy, hashes)."""

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
    numbers, results = iter(range(len(items))), dict[int, _Result]()

    def share() -> None:
        """A thread takes what comes next: a task for each item would cost as much as a small one."""
        try:
            for number in numbers:
                results[number] = work(items[number])
        except BaseException:
            for _ in numbers:
                pass  # nobody begins another one
            raise

    threads = min(num_threads(), len(items))
    with ThreadPoolExecutor(max(threads, 1), "all-cores") as pool:
        for done in [pool.submit(share) for _ in range(threads)]:
            done.result()
    return [results[number] for number in range(len(items))]
