import json
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

import pytest

from scheduler.simulate.costs import StepCost, UnknownCosts, read_costs
from scheduler.simulate.fit import Seen, fitted, link_seconds

COST = StepCost(0.004, 1e-5, 2e-5, 3e-8, 1e-3, 1e-5, 2e-5, 2e-4, 1.5e-6, 1.7e-6, 2e-6)


def seen(rng: Random) -> Seen:
    decoding, prompt_tokens = rng.choice([0, rng.randint(1, 256)]), rng.choice([0, rng.randint(1, 8192)])
    rank, slots = rng.choice([0, rng.randint(8, 2000)]), rng.choice([16, 64, 384])
    seconds = COST.seconds(decoding, 500 * decoding, prompt_tokens, rank, slots)
    return Seen("a step", decoding, rng.randint(200, 900) * decoding, prompt_tokens, rank, slots, seconds)


def test_what_is_known_is_found_again() -> None:
    rng = Random(3)
    steps = [seen(rng) for _ in range(60)]
    exact = [
        replace(
            one,
            seconds=COST.seconds(one.decoding, one.kv_tokens, one.prompt_tokens, one.used_rank, one.slots),
        )
        for one in steps
    ]
    assert asdict(fitted(exact)) == pytest.approx(asdict(COST), rel=1e-6)


def test_parts_that_nothing_tells_of_are_refused() -> None:
    alone = [replace(seen(Random(number)), prompt_tokens=0, used_rank=0) for number in range(20)]
    with pytest.raises(ValueError, match="4 of 11 parts apart"):
        fitted(alone)


def test_a_part_below_zero_is_refused() -> None:
    rng = Random(3)
    steps = [seen(rng) for _ in range(60)]
    with pytest.raises(ValueError, match="sequence_s"):
        fitted([replace(one, seconds=0.1 - 1e-4 * one.decoding) for one in steps])


def test_the_link_is_what_idle_executors_first_tokens_take_beyond_their_step() -> None:
    idle_ms = 1000 * COST.seconds(0, 0, 128, 16, 8) + 2 * 1.5
    curve = [idle_ms + 0.1 * at for at in range(-2, 12)]
    rows = [{"workload": "start to ready"}, {"workload": "TTFT p50, 4 requests/s", "slots": 8}]
    rows[1]["ttft_ms"] = {"curve": curve}
    assert link_seconds({"rows": rows}, COST) == pytest.approx(0.0015)


def test_coefficients_name_what_is_wrong_with_them(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    with pytest.raises(UnknownCosts, match="cannot be read"):
        read_costs(str(file))
    whole = json.loads(Path("scheduler/simulate/coefficients/llama-3.1-8b-h200.json").read_text())
    whole["costs"]["step"]["speed"] = 1.0
    file.write_text(json.dumps(whole))
    with pytest.raises(UnknownCosts, match="StepCost has no speed"):
        read_costs(str(file))


def test_committed_coefficients_say_what_they_were_fitted_to_and_are_near() -> None:
    whole = json.loads(Path("scheduler/simulate/coefficients/llama-3.1-8b-h200.json").read_text())
    assert all(each["git"] and each["gpu"] == whole["costs"]["card"] for each in whole["fitted_to"])
    assert whole["relative_error"]["worst"] <= 0.1
