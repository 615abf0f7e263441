"""What hostile constraints do to the gaps between tokens of other streams: `make constraints` measures it.

SmolLM2 on real services. Four streams of one tenant run all the time; another tenant, a process of its own,
asks by turns for nothing, for plain answers, for what is refused, and for the most that is not.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

from scheduler.bench.about import about

from lorafleet import AsyncClient
from lorafleet.demo.model import default_cache, prepare_model
from lorafleet.terminal import ProgressBar
from tests.support.constrained.hostile import WAYS
from tests.support.flood.run import token_entry
from tests.support.services.fleet import running_fleet

STREAMS, TOKENS = 4, 400
SETTLE_S = 2.0  # Until a way has begun, or ended.


class Streams:
    """Streams that begin anew when they end; `gaps` are those of now, in milliseconds."""

    def __init__(self, address: str) -> None:
        self._client = AsyncClient(address, token="honest")
        self.gaps: list[float] = []

    async def run(self) -> None:
        async with self._client, asyncio.TaskGroup() as running:
            for number in range(STREAMS):
                running.create_task(self._one(number))

    async def _one(self, number: int) -> None:
        while True:
            last = 0.0
            stream = self._client.stream([number + 5, 6, 7], max_new_tokens=TOKENS, ignore_eos=True)
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    now = time.perf_counter()
                    if chunk.token_ids and last:
                        self.gaps.append(1000 * (now - last))
                    last = now if chunk.token_ids else last


async def measure(address: str, seconds: float, rounds: int) -> dict[str, list[float]]:
    streams = Streams(address)
    running = asyncio.create_task(streams.run())
    await asyncio.sleep(SETTLE_S)
    found: dict[str, list[float]] = {way: [] for way in ("alone", *WAYS)}
    for _ in range(rounds):
        for way, gaps in found.items():
            process = None if way == "alone" else _hostile(address, way)
            await asyncio.sleep(SETTLE_S)
            streams.gaps.clear()
            await asyncio.sleep(seconds)
            gaps += streams.gaps
            if process is not None:
                process.kill()
                process.wait()
            await asyncio.sleep(SETTLE_S)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return found


def _hostile(address: str, way: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.constrained.hostile", address, "hostile", way]
    )


def summary(gaps: list[float]) -> dict[str, Any]:
    cuts = statistics.quantiles(gaps, n=100)
    return {"gaps": len(gaps), "p50_ms": round(cuts[49], 2), "p99_ms": round(cuts[98], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.constrained.gaps", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where results go")
    parser.add_argument("--seconds", type=float, default=10, help="of each way in each round")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    said, model = (
        about("tests.support.constrained.gaps"),
        prepare_model(default_cache(), ProgressBar().update),
    )
    with tempfile.TemporaryDirectory() as name:
        tokens = Path(name) / "tokens.toml"
        tokens.write_text("".join(token_entry(tenant, tenant) for tenant in ("honest", "hostile")))
        store = Path(name) / "store"
        with running_fleet(model, store, scheduler_args=("--tokens-file", str(tokens))) as fleet:
            found = asyncio.run(measure(fleet.target, args.seconds, args.rounds))
    rows = {way: summary(gaps) for way, gaps in found.items()}
    args.json.write_text(json.dumps({**said, "streams": STREAMS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
