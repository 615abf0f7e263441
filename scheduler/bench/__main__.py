"""`python -m scheduler.bench`: times of listing and resolving many adapters, in a folder and in Redis."""

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adapter_store import open_store
from adapter_store.bench.inputs import SPEC, write_adapter
from adapter_store.bench.server import find_server, running
from lorafleet.bench.results import Results, head
from scheduler.bench import listing, resolve
from scheduler.bench.fill import fill_folder, fill_redis, names

LISTED, RESOLVED = 100_000, 1_000


def main() -> None:
    args = _parser().parse_args()
    results = Results(args.json, head("python -m scheduler.bench"))
    for row in _run(args.model, args.rounds, args.seconds):
        results.add({**row, "load_average": os.getloadavg()[0]})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scheduler.bench", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="any model's folder, for the scheduler")
    parser.add_argument("--json", type=Path, required=True, help="where results go")
    parser.add_argument("--rounds", type=int, default=5, help="listings of each kind (5)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of resolutions (20)")
    return parser


def _run(model: Path, rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="lorafleet-bench-") as temporary:
        folder = Path(temporary)
        for count in (LISTED // 100, LISTED):
            root = folder / f"listed-{count}"
            open_store(str(root))
            fill_folder(root, "default", names(count))
            yield {"case": "list", "store": "folder", "adapters": count} | listing.measure(
                model, str(root), count, rounds
            )
        yield {"case": "resolve", "store": "folder"} | _resolve(str(folder / "resolved"), folder, seconds)
        (folder / "redis").mkdir()
        with running(find_server(), folder / "redis", "everysec") as port:
            for count in (LISTED // 100, LISTED):
                url = f"redis://127.0.0.1:{port}?namespace=listed-{count}"
                fill_redis(url, "default", names(count))
                yield {"case": "list", "store": "redis", "adapters": count} | listing.measure(
                    model, url, count, rounds
                )
            url = f"redis://127.0.0.1:{port}?namespace=resolved"
            yield {"case": "resolve", "store": "redis"} | _resolve(url, folder, seconds)


def _resolve(url: str, folder: Path, seconds: float) -> dict[str, Any]:
    store, digests = open_store(url), list[str]()
    for seed in (1, 2):
        pushed = folder / f"pushed-{seed}"
        if not pushed.exists():
            write_adapter(pushed, seed=seed)
        digests.append(store.put(pushed, resolve.TENANT, "origin", SPEC).digest)
    records = list(names(RESOLVED, tuple(digests)))
    if url.startswith("redis"):
        fill_redis(url, resolve.TENANT, records)
    else:
        fill_folder(Path(url), resolve.TENANT, records)
    return {"adapters": RESOLVED} | resolve.measure(
        url, [name for name, _ in records], tuple(digests), seconds
    )


if __name__ == "__main__":
    main()
