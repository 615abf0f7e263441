"""`python -m scheduler.bench.streaming`: streams through a real scheduler, and from a bare server."""

import argparse
import asyncio
import importlib.util
import json
import os
from pathlib import Path
from statistics import fmean
from typing import Any

from adapter_store import ModelSpec
from lorafleet.bench.results import head, say, write
from lorafleet.tls.files import Tls
from scheduler.bench.streaming.locks import Locks, locks
from scheduler.bench.streaming.pace import Record
from scheduler.bench.streaming.reader import Seen, read
from scheduler.bench.streaming.servers import Load, bare, executors, scheduler


def main() -> None:
    args = _parser().parse_args()
    for asked in args.asked:
        load = Load(args.streams, args.executors, asked, args.seconds)
        row = {**_measure(args.model, load, args.interval_ms, args.tls), "load_average": os.getloadavg()[0]}
        say(row)
        rows = json.loads(args.json.read_text())["rows"] if args.json.exists() else []
        write(args.json, {**head("python -m scheduler.bench.streaming"), "rows": [*rows, row]})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scheduler.bench.streaming", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="any byte-level model's folder")
    parser.add_argument("--json", type=Path, required=True, help="where rows are added")
    parser.add_argument("--asked", type=int, nargs="+", default=[8000], help="tokens a second (8000)")
    parser.add_argument("--streams", type=int, default=1000, help="(1000)")
    parser.add_argument("--executors", type=int, default=16, help="(16)")
    parser.add_argument("--interval-ms", type=int, default=0, help="the scheduler's --stream-interval-ms (0)")
    parser.add_argument(
        "--tls",
        action="store_true",
        help="and with TLS to the client and mutual TLS to executors, between two runs in clear",
    )
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement (6)")
    return parser


def _measure(model: Path, load: Load, interval_ms: int, with_tls: bool) -> dict[str, Any]:
    """A row. Latencies are from an executor's step to the client's read, in milliseconds; times of a core, in
    microseconds. The bare server runs before the scheduler and after it, and counts with the mean of both:
    what a core is worth on a shared machine changes from minute to minute."""
    tokens = ModelSpec.from_folder(model).max_model_len - 8
    before = _bare(load, tokens)
    seen, added = _scheduled(model, load, interval_ms, None)
    tls = _tls_fields(model, load, interval_ms, seen) if with_tls else {}
    bares = before, _bare(load, tokens)
    count = _num_tokens(seen)
    return {
        "streams": load.streams,
        "executors": load.executors,
        "interval_ms": interval_ms,
        "uvloop": importlib.util.find_spec("uvloop") is not None,
        "asked_tokens_s": load.asked,
        "tokens_s": round(count / seen.window_s),
        "tokens_per_chunk": round(count / max(1, len(seen.chunks)), 2),
        "started": len(seen.started_s),
        "last_start_s": round(max(seen.started_s, default=-1), 2),
        "added_p50_ms": added[0],
        "added_p99_ms": added[1],
        "scheduler_us_per_token": round(_us_per_token(seen), 1),
        "scheduler_us_per_chunk": round(seen.busy_s * 1e6 / max(1, len(seen.chunks)), 1),
        **{name: round(fmean(each[name] for each in bares), 1) for name in before},
        "bare_us_per_chunk_apart": [each["bare_us_per_chunk"] for each in bares],
        **tls,
    }


def _scheduled(
    model: Path, load: Load, interval_ms: int, locks: Locks | None
) -> tuple[Seen, tuple[float, float]]:
    """What a client saw of streams through a scheduler, and their latencies."""
    spec = ModelSpec.from_folder(model)
    flags = ["--stream-interval-ms", str(interval_ms)] if interval_ms else []
    flags += locks.scheduler_flags if locks else []
    with (
        executors(spec.fingerprint, load, locks.executor if locks else None) as (addresses, finish),
        scheduler(model, addresses, load.streams, *flags) as (address, pid),
    ):
        seen = _client(address, pid, load, spec.max_model_len - 8, locks.client if locks else None)
        return seen, _latencies(seen, finish())


def _tls_fields(model: Path, load: Load, interval_ms: int, before: Seen) -> dict[str, Any]:
    """The figures with TLS, and then in clear once more: the cost is over the mean of both runs in clear."""
    with locks() as made:
        seen, added = _scheduled(model, load, interval_ms, made)
    after, _ = _scheduled(model, load, interval_ms, None)
    clear = [round(_us_per_token(each), 1) for each in (before, after)]
    return {
        "tls_tokens_s": round(_num_tokens(seen) / seen.window_s),
        "tls_added_p50_ms": added[0],
        "tls_added_p99_ms": added[1],
        "tls_scheduler_us_per_token": round(_us_per_token(seen), 1),
        "clear_us_per_token_apart": clear,
        "tls_cost": round(_us_per_token(seen) / fmean(clear) - 1, 3),
    }


def _num_tokens(seen: Seen) -> int:
    return sum(chunk[2] for chunk in seen.chunks)


def _us_per_token(seen: Seen) -> float:
    return seen.busy_s * 1e6 / max(1, _num_tokens(seen))


def _bare(load: Load, tokens: int) -> dict[str, float]:
    with bare(load) as (address, pid, finish):
        seen = _client(address, pid, load, tokens)
        p50, p99 = _latencies(seen, finish())
    return {
        "bare_us_per_chunk": round(seen.busy_s * 1e6 / max(1, len(seen.chunks)), 1),
        "bare_tokens_s": round(len(seen.chunks) / seen.window_s),
        "bare_added_p50_ms": p50,
        "bare_added_p99_ms": p99,
    }


def _latencies(seen: Seen, record: Record) -> tuple[float, float]:
    """Median and 99th percentile over all tokens."""
    each = sorted(
        when - record.made(stream, index + offset)
        for stream, index, count, when in seen.chunks
        for offset in range(count)
    )
    if not each:
        return -1.0, -1.0
    return round(each[len(each) // 2] * 1e3, 1), round(each[len(each) * 99 // 100] * 1e3, 1)


def _client(address: str, pid: int, load: Load, tokens: int, tls: Tls | None = None) -> Seen:
    return asyncio.run(read(address, pid, load.streams, tokens, load.window_s, tls))


if __name__ == "__main__":
    main()
