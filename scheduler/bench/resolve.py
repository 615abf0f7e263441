"""How long a ref takes to resolve, while another process moves aliases."""

import bisect
import itertools
import multiprocessing
import random
import time
from collections import Counter
from multiprocessing.synchronize import Event
from typing import Any

from adapter_store import Ref, open_store
from scheduler.admission.versions import Versions

TENANT = "bench"
MOVES_PER_S = 20.0


def measure(store: str, names: list[str], digests: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """Refs by alias, as popular as Zipf says (exponent 1). Microseconds: percentiles of all."""
    sources = Counter[str]()
    versions = Versions(open_store(store), count=lambda source: sources.update([source]))
    versions.start()
    spawn = multiprocessing.get_context("spawn")
    ended = spawn.Event()
    mover = spawn.Process(target=_move, args=(store, names, digests, ended), daemon=True)
    mover.start()
    try:
        samples = _sample(versions, names, seconds)
    finally:
        ended.set()
        mover.join()
        versions.stop()
    samples.sort()
    total = sum(sources.values())
    return {
        "resolutions": len(samples),
        **{f"p{p:g}_us": round(samples[int(len(samples) * p / 100)] * 1e6, 1) for p in (50, 99, 99.9)},
        "max_us": round(samples[-1] * 1e6, 1),
        "share": {source: round(count / total, 4) for source, count in sorted(sources.items())},
        "alias_moves_per_s": MOVES_PER_S,
    }


def _sample(versions: Versions, names: list[str], seconds: float) -> list[float]:
    """Seconds of each resolution. At most 10,000 a second, so that it is latency that is measured."""
    draw = random.Random(1)
    bounds = list(itertools.accumulate(1 / rank for rank in range(1, len(names) + 1)))
    samples: list[float] = []
    deadline = time.perf_counter() + seconds
    while (now := time.perf_counter()) < deadline:
        name = names[bisect.bisect(bounds, draw.random() * bounds[-1])]
        ref = Ref(TENANT, name, alias="latest")
        start = time.perf_counter()
        versions.known(ref) or versions.resolve(ref)
        samples.append(time.perf_counter() - start)
        time.sleep(max(0.0, 1e-4 - (time.perf_counter() - now)))
    return samples


def _move(store: str, names: list[str], digests: tuple[str, ...], ended: Event) -> None:
    draw, opened = random.Random(2), open_store(store)
    while not ended.wait(1 / MOVES_PER_S):
        opened.set_alias(TENANT, draw.choice(names), "latest", draw.choice(digests))
