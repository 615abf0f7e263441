"""How sequences end, or do not begin, and that nothing of them stays."""

import random
from collections.abc import Callable

import pytest

from executor.batch.sampling import SamplingParams
from executor.batch.sequence import FinishReason, StopRules
from tests.support.engines.driver import PROMPTS, Driver, greedy, in_both_modes

Make = Callable[..., Driver]
pytestmark = in_both_modes


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_cancel_frees_everything_at_once(make_engine: Make, digests: list[str], steps: int) -> None:
    driver = make_engine()
    dispatch = greedy("x", PROMPTS[2], digest=digests[0], max_new_tokens=100)
    driver.engine.add(dispatch)
    for _ in range(steps):
        driver.step()
    driver.engine.cancel(dispatch.key)
    driver.engine.cancel(dispatch.key)
    status = driver.step().status
    assert (status.running, status.waiting, status.free_seats) == (0, 0, 16)
    assert (status.free_kv_blocks, status.free_slots) == (64, 2)
    assert driver.engine.pager.users() == {}
    assert not driver.finished and not driver.rejected


def test_random_cancels_leave_every_count_at_zero(make_engine: Make, digests: list[str]) -> None:
    driver = make_engine(max_seats=30, num_kv_blocks=16, adapter_aging=0.01)
    rng = random.Random(3)
    dispatches = [
        greedy(f"{i}", PROMPTS[i % 4], digest=digests[i % 3], max_new_tokens=1 + i % 9) for i in range(30)
    ]
    for dispatch in dispatches:
        driver.engine.add(dispatch)
    doomed = rng.sample(dispatches, 13)
    for dispatch in doomed:
        driver.engine.cancel(dispatch.key)
        driver.step()
    driver.until(lambda: not driver.engine.batcher.sequences)
    assert driver.engine.pager.users() == {}
    for digest in digests[:3]:
        driver.engine.drop(digest)
    driver.step()
    assert driver.engine.batcher.slots.digests == {}
    assert list(driver.engine.pager.host) == []


def test_ends(make_engine: Make, digests: list[str]) -> None:
    driver = make_engine(max_model_len=64)
    tokens = driver.run(greedy("plain", PROMPTS[0]))[0]
    third = tokens[2]

    def end(name: str, **rules: object) -> tuple[int, FinishReason]:
        rules.setdefault("ignore_eos", True)
        dispatch = greedy(name, PROMPTS[0], stop=StopRules(**rules))  # type: ignore[arg-type]
        got = driver.run(dispatch)[0]
        return len(got), driver.finished[dispatch.key]

    first = tokens.index(third) + 1
    assert end("stop", stop_token_ids=frozenset({third})) == (first, FinishReason.STOP)
    assert end("length", max_new_tokens=3) == (3, FinishReason.LENGTH)
    assert end("model") == (44, FinishReason.LENGTH)
    count, reason = end("later", stop_token_ids=frozenset({third}), min_new_tokens=5, max_new_tokens=12)
    assert count > 5 or reason is FinishReason.LENGTH


def test_a_time_limit_ends_running_and_waiting_sequences(make_engine: Make) -> None:
    now = 100.0
    driver = make_engine(clock=lambda: now)
    driver.engine.add(greedy("soon", PROMPTS[0], max_new_tokens=200, deadline=101.0))
    driver.engine.add(greedy("late", PROMPTS[1], max_new_tokens=200, deadline=300.0))
    driver.until(lambda: len(driver.token_ids((0, "soon"))) == 3)
    now = 101.0
    driver.step()
    assert driver.finished == {(0, "soon"): FinishReason.TIME_LIMIT}
    assert len(driver.token_ids((0, "soon"))) == 3


def test_an_adapter_too_big_for_a_slot_is_refused_by_name(make_engine: Make, digests: list[str]) -> None:
    driver = make_engine(max_lora_rank=8)
    driver.engine.add(greedy("big", PROMPTS[0], digest=digests[4]))
    driver.until(lambda: bool(driver.rejected))
    rejection = driver.rejected[0, "big"]
    assert rejection.reason == "INCOMPATIBLE_ADAPTER"
    assert "rank 16" in rejection.message


def test_what_cannot_run_is_refused_at_admission(make_engine: Make) -> None:
    driver = make_engine(max_seats=2)
    cases = {
        "empty": greedy("empty", []),
        "long": greedy("long", [1] * 512),
        "vocabulary": greedy("vocabulary", [1, 128]),
        "bias": greedy("bias", [1], sampling=SamplingParams(logit_bias=((500, 1.0),))),
    }
    for dispatch in cases.values():
        driver.engine.add(dispatch)
    driver.engine.add(greedy("one", PROMPTS[0]))
    driver.engine.add(greedy("one", PROMPTS[0]))
    driver.engine.add(greedy("two", PROMPTS[0]))
    driver.engine.add(greedy("three", PROMPTS[0]))
    driver.engine.drain()
    driver.engine.add(greedy("four", PROMPTS[0]))
    driver.step()
    reasons = {key[1]: rejection.reason for key, rejection in driver.rejected.items()}
    refused = dict.fromkeys(cases, "INVALID_REQUEST")
    assert reasons == refused | {"one": "INVALID_REQUEST", "three": "NO_SEATS", "four": "DRAINING"}
    driver.rejected.clear()
    driver.until(lambda: len(driver.finished) == 2)
