"""`python -m scheduler.simulate.fit`: coefficients of a card from results of `lorafleet bench`.

Each row of a preset with known contents gives what some step takes: an answer's time a token is that of a
step that only decodes, the first token of a burst that of a step of prompts. The parts of a step are those
with the least sum of squared relative errors over all of them (numpy's least squares).
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lorafleet.bench.results import head, say, write
from lorafleet.bench.statistics import CURVE_POINTS
from scheduler.simulate.costs import FEW_SEQUENCES, FEW_TOKENS, StepCost
from scheduler.simulate.report import rounded

RANK_BYTES = 5_242_880  # Of an adapter on the seven projections of Llama-3.1-8B, in bfloat16.
STEP_TOKENS = 8192
CAPTURED_ROWS = (32, 64, *range(128, 385, 64), *range(512, 1025, 128))  # executor/gpu/graph_plans.py
# Of steps by their rows, while 20 answers go on by the preset real-traffic, 0.47 of the capacity, on an H200
# with 384 slots (lorafleet/bench/results/README.md, and of 20 rows real-traffic-h200.json): 576 tokens in and
# 160 out in the mean, on some 15 adapters of rank 13.
MS_BY_ROWS = {20: 6.16, 64: 7.9, 128: 8.9, 256: 10.7, 384: 13.8, 512: 16.5}
BY_ROWS_FROM = {
    "file": "lorafleet/bench/results/real-traffic-h200.json",
    "git": "4f4da2a",
    "gpu": "NVIDIA H200",
}
PARTS = tuple(StepCost.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a step had in it, and how long it took. `used_rank`: see `StepCost.seconds`."""

    what: str
    decoding: int
    kv_tokens: int
    prompt_tokens: int
    used_rank: int
    slots: int
    seconds: float

    @property
    def parts(self) -> list[float]:
        """The counts of each part of a step's time, how many it had."""
        has_lora, few = float(self.used_rank > 0), min(self.prompt_tokens, FEW_TOKENS)
        few_sequences = min(self.decoding, FEW_SEQUENCES)
        return [
            1.0,
            few_sequences,
            self.decoding - few_sequences,
            self.kv_tokens,
            float(self.prompt_tokens > 0),
            few,
            self.prompt_tokens - few,
            has_lora,
            self.used_rank,
            has_lora * self.prompt_tokens,
            has_lora * self.slots,
        ]


def seen_in(results: Mapping[str, Any]) -> Iterator[Seen]:
    """What was seen in the presets d1 to d4, high-ranks, arriving-prompts and page-in-stall."""
    for row in results["rows"]:
        name, _, kind = row["workload"].partition(",")
        adapters, what = row["adapters"], f"{row['workload']}, {row['adapters']} adapters"
        rank = adapters * (int(kind.removeprefix(" rank ")) if kind.startswith(" rank") else 16)
        if name == "D1":
            yield _decode(what, row, "tpot_ms", 64, 128, 128, rank)
            yield _burst(what, row, 64 * 128, rank)
        elif name == "D2" and not kind:
            yield _decode(what, row, "itl_ms", 256, 256, 128, rank)
        elif name == "D3":
            yield _decode(what, row, "tpot_ms", 1, 128, 128, rank)
        elif name == "D3 x 8":
            yield _decode(what, row, "tpot_ms", 8, 128, 128, rank)
        elif name.startswith("D4 8 x "):
            tokens = 8 * int(name.removeprefix("D4 8 x "))
            steps = -(-tokens // STEP_TOKENS)
            yield Seen(what, 0, 0, tokens // steps, rank, row["slots"], row["seconds"] / steps)
        elif row["workload"] == "ITL of 64 streams, alone":
            tokens = round(row["output_tokens_per_s"] * row["seconds"] / 64)
            yield _decode(what, row, "itl_ms", 64, 128, tokens, rank)
        elif row["workload"] == "ITL of 64 streams, 20 prompts/s arriving":
            # A step has one prompt of 32 to 128 tokens, and is filled up to 192 rows at most.
            yield Seen(
                f"{what}, p99",
                64,
                64 * (128 + 256),
                192 - 64,
                rank,
                row["slots"],
                row["itl_ms"]["p99"] / 1000,
            )


def by_rows() -> Iterator[Seen]:
    """What MS_BY_ROWS tells."""
    for rows, ms in MS_BY_ROWS.items():
        yield Seen(f"{rows} rows, 20 of them decode", 20, 20 * (576 + 80), rows - 20, 15 * 13, 384, ms / 1000)


def _decode(
    what: str, row: Mapping[str, Any], key: str, sequences: int, prompt: int, output: int, rank: int
) -> Seen:
    kv_tokens = sequences * (prompt + output // 2)
    return Seen(f"{what}, {key}", sequences, kv_tokens, 0, rank, row["slots"], row[key]["p50"] / 1000)


def _burst(what: str, row: Mapping[str, Any], tokens: int, rank: int) -> Seen:
    return Seen(f"{what}, ttft_ms", 0, 0, tokens, rank, row["slots"], row["ttft_ms"]["p50"] / 1000)


def fitted(seen: Sequence[Seen]) -> StepCost:
    """Raises ValueError where what was measured tells some part not apart, or one comes out below zero."""
    weights = np.array([1 / each.seconds for each in seen])
    parts = np.array([each.parts for each in seen]) * weights[:, None]
    scale = np.maximum(np.abs(parts).max(axis=0), np.finfo(float).tiny)
    found, _, rank, _ = np.linalg.lstsq(parts / scale, np.ones(len(seen)), rcond=None)
    if rank < len(PARTS):
        raise ValueError(f"these steps tell {rank} of {len(PARTS)} parts apart; fit to more kinds of steps")
    cost = StepCost(**dict(zip(PARTS, map(float, found / scale), strict=True)))
    if below := [name for name in PARTS if getattr(cost, name) < 0]:
        raise ValueError(f"the parts {', '.join(below)} come out below zero; fit to more kinds of steps")
    return cost


def load_seconds(results: Sequence[Mapping[str, Any]], key: str) -> float:
    """The median over rows of adapters of rank 16, all loader threads busy: `load_ms`, or `page_in_ms`."""
    found: list[float] = [
        row[key] / 1000
        for each in results
        for row in each["rows"]
        if row["workload"].startswith("D2 ") and row.get(key)
    ]
    return statistics.median(found)


def link_seconds(light: Mapping[str, Any], cost: StepCost) -> float:
    """One way between a client and an executor, of a result of the preset no-cliff through the product.

    With so few requests every third comes to an idle executor. So a tenth of their first tokens take a step
    of a prompt of 128 tokens and the way there and back, at most.
    """
    row = next(row for row in light["rows"] if row["workload"].startswith("TTFT p50,"))
    idle_s: float = row["ttft_ms"]["curve"][CURVE_POINTS.index(10)] / 1000
    return (idle_s - cost.seconds(0, 0, 128, 16, row["slots"])) / 2


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m scheduler.simulate.fit", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="result files of one card")
    parser.add_argument("--model", default="llama-3.1-8b", help="whose shapes they were measured with")
    parser.add_argument("--by-rows", action="store_true", help="fit to MS_BY_ROWS of an H200, too")
    parser.add_argument("--light", type=Path, required=True, help="a result of no-cliff through the product")
    parser.add_argument("--json", type=Path, required=True, help="where the coefficients go")
    args = parser.parse_args(arguments)
    results = [json.loads(file.read_text()) for file in args.files]
    light = json.loads(args.light.read_text())
    seen = [each for one in results for each in seen_in(one)]
    seen += by_rows() if args.by_rows else ()
    cost = fitted(seen)
    errors = [_error(cost, each) for each in seen]
    byte_s = 1 / 54e9  # Of the bus, from pinned memory.
    size, page_in_s = 16 * RANK_BYTES, load_seconds(results, "page_in_ms")
    whole = {
        "costs": {
            "card": results[0]["gpu"],
            "model": args.model,
            "step": {name: rounded(getattr(cost, name)) for name in PARTS},
            "load": {
                "store": {"fixed_s": 0.0, "byte_s": rounded(load_seconds(results, "load_ms") / size)},
                "disk": {"fixed_s": 0.0, "byte_s": rounded(load_seconds(results, "load_ms") / size)},
            },
            "page_in": {"fixed_s": rounded(page_in_s - size * byte_s), "byte_s": rounded(byte_s)},
            "rank_bytes": RANK_BYTES,
            "link_s": rounded(link_seconds(light, cost)),
            "launch_s": 0.02,
            "captured_rows": CAPTURED_ROWS,
            "steps_ahead": 1,
        },
        "fitted_to": [
            *(
                {"file": str(file), "git": one["git"], "gpu": one["gpu"]}
                for file, one in zip([*args.files, args.light], [*results, light], strict=True)
            ),
            *([BY_ROWS_FROM] if args.by_rows else []),
        ],
        **head("python -m scheduler.simulate.fit"),
        "relative_error": {
            "median": rounded(statistics.median(map(abs, errors))),
            "worst": rounded(max(map(abs, errors))),
        },
        "rows": [
            {"what": each.what, "ms": rounded(1000 * each.seconds), "error": rounded(error)}
            for each, error in zip(seen, errors, strict=True)
        ],
    }
    write(args.json, whole)
    say(whole["relative_error"])


def _error(cost: StepCost, seen: Seen) -> float:
    expected_s = cost.seconds(seen.decoding, seen.kv_tokens, seen.prompt_tokens, seen.used_rank, seen.slots)
    return expected_s / seen.seconds - 1


if __name__ == "__main__":
    main()
