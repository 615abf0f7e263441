"""Steps planned one ahead: the same tokens as from steps in turn, whatever happens meanwhile."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter_store import DiskStore
from executor.adapters.residency import Tier
from executor.batch.sequence import FinishReason, StopRules
from tests.support.engines.driver import Driver, greedy, make_driver
from tests.support.engines.mixed_dispatches import dispatches
from tests.support.engines.set_pace import SetPace

Make = Callable[..., Driver]


@pytest.fixture
def ahead(make_engine: Make) -> Make:
    return lambda **settings: make_engine(async_scheduling="true", **settings)


@dataclass
class Outcome:
    tokens: list[int]
    logprobs: list[float]
    prompt: list[float | None]
    reason: FinishReason | None


def outcomes(driver: Driver, keys: Sequence[tuple[int, str]]) -> list[Outcome]:
    found = []
    for key in keys:
        told = driver.tokens.get(key, [])
        prompt = [score.logprob for token in told for score in token.prompt_scores]
        logprobs = [token.token.logprob for token in told if token.token.logprob == token.token.logprob]
        found.append(Outcome(driver.token_ids(key), logprobs, prompt, driver.finished.get(key)))
    return found


@pytest.fixture(scope="module")
def alone(tiny_base: Path, tiny_store: DiskStore, digests: list[str]) -> list[Outcome]:
    driver = make_driver(str(tiny_base), tiny_store, prefix_cache=False)
    for dispatch in dispatches(digests):
        driver.run(dispatch)
    driver.engine.close()
    found = outcomes(driver, [dispatch.key for dispatch in dispatches(digests)])
    assert {outcome.reason for outcome in found} == {FinishReason.STOP, FinishReason.LENGTH}
    return found


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.permutations(range(12)),
    pauses=st.lists(st.integers(0, 3), min_size=12, max_size=12),
    cancels=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 11)), max_size=4),
    slots=st.sampled_from([1, 2, 4]),
    chunk=st.sampled_from([12, 16, 64]),
    room=st.sampled_from([1, 5, 512]),
    blocks=st.sampled_from([10, 14, 64]),
    page_ins=st.sampled_from([1, 4]),
)
def test_the_same_traffic_brings_the_same_tokens(
    tiny_base: Path,
    tiny_store: DiskStore,
    digests: list[str],
    alone: list[Outcome],
    order: list[int],
    pauses: list[int],
    cancels: list[tuple[int, int]],
    slots: int,
    chunk: int,
    room: int,
    blocks: int,
    page_ins: int,
) -> None:
    driver = make_driver(
        str(tiny_base),
        tiny_store,
        async_scheduling="true",
        max_loras=slots,
        max_batched_tokens=chunk,
        max_seats=12,
        num_kv_blocks=blocks,
        page_ins_per_step=page_ins,
        adapter_aging=0.01,
    )
    wanted, beat, cancelled = dispatches(digests), 0, set()

    def step() -> None:
        nonlocal beat
        for when, number in cancels:
            if when == beat and wanted[number].key not in driver.finished:
                driver.engine.cancel(wanted[number].key)
                cancelled.add(number)
        beat += 1
        streams = [s for s in driver.engine.batcher.running if s.has_drawn and s.uncomputed == 1]
        driver.step()
        # However short it is, a stream that has begun is in the next step at once.
        assert all(stream.in_flight for stream in streams if stream in driver.engine.batcher.running)

    with mock.patch.object(driver.engine, "_pace", SetPace(room)):
        for pause, number in zip(pauses, order, strict=True):
            driver.engine.add(wanted[number])
            for _ in range(pause):
                step()
        while beat <= 41:
            step()
        driver.until(lambda: not driver.engine.batcher.sequences)
    driver.engine.close()
    assert not driver.rejected
    for number, (got, truth) in enumerate(zip(outcomes(driver, [d.key for d in wanted]), alone, strict=True)):
        if number in cancelled and got.reason is None:
            assert got.tokens == truth.tokens[: len(got.tokens)]
            continue
        assert (got.tokens, got.reason) == (truth.tokens, truth.reason)
        assert got.logprobs == pytest.approx(truth.logprobs, abs=1e-4)
        assert got.prompt == pytest.approx(truth.prompt, abs=1e-4)


def idle(driver: Driver) -> bool:
    """Everything is free, after at most two steps, with nothing told."""
    for _ in range(2):
        events = driver.step()
        assert not (events.tokens or events.finished or events.rejected)
    status, batcher = events.status, driver.engine.batcher
    free = (status.free_seats, status.free_kv_blocks, status.free_slots) == (16, 64, 2)
    return free and not events.runs and not batcher.leaving and driver.engine.pager.users() == {}


def test_the_extra_token_of_a_sequence_that_stops_leaves_no_trace(ahead: Make, digests: list[str]) -> None:
    prompt = range(3, 18)
    answer = ahead().run(greedy("free", prompt, digest=digests[3]))[0]
    stop = answer[2]
    assert stop not in answer[:2]
    driver = ahead()
    stopped = greedy("x", prompt, digest=digests[3], stop=StopRules(stop_token_ids=frozenset({stop})))
    driver.engine.add(stopped)
    driver.until(lambda: bool(driver.finished))
    # 15 prompt tokens and 3 drawn ones, in blocks of 8: the step that still runs fills no block.
    leaving = driver.engine.batcher.leaving
    assert [s.dispatch.key for s in leaving] == [stopped.key]
    assert driver.engine.batcher.slots.in_use == 1
    assert idle(driver)
    assert driver.token_ids(stopped.key) == answer[:3]
    assert driver.metric("tokens_total", kind="generated") == 3
    assert driver.run(replace(stopped, key=(0, "again")))[0] == answer[:3]
    assert driver.cached[0, "again"] == 8


def test_answers_are_cached_block_by_block(ahead: Make, digests: list[str]) -> None:
    driver, prompt = ahead(), list(range(3, 16))
    [answer] = driver.run(greedy("first", prompt, digest=digests[3], max_new_tokens=30))
    longer = greedy("second", prompt + answer + [9], digest=digests[3])
    driver.run(longer)
    # Of 43 tokens the last one was never computed: five blocks of 8 are whole.
    assert driver.cached[longer.key] == 40


def test_a_sequence_at_its_length_is_in_no_further_step(ahead: Make) -> None:
    driver = ahead(num_kv_blocks=2, max_model_len=16)
    tokens = driver.run(greedy("x", range(3, 13), max_new_tokens=100))[0]
    assert len(tokens) == 6
    assert driver.metric("steps_total") == 6


@pytest.mark.parametrize("steps", range(1, 5))
def test_a_cancel_frees_everything_when_the_step_is_over(ahead: Make, digests: list[str], steps: int) -> None:
    driver = ahead()
    dispatch = greedy("x", range(3, 36), digest=digests[0], max_new_tokens=100)
    driver.engine.add(dispatch)
    for _ in range(steps):
        driver.step()
    told = len(driver.token_ids(dispatch.key))
    driver.engine.cancel(dispatch.key)
    driver.engine.check()
    assert driver.engine.batcher.free_seats == 16
    assert idle(driver)
    assert len(driver.token_ids(dispatch.key)) == told


def test_the_same_dispatch_id_can_come_back_while_the_old_one_leaves(ahead: Make) -> None:
    driver = ahead()
    old, new = greedy("x", range(3, 10)), greedy("x", range(50, 70))
    [expected] = ahead().run(new)
    driver.engine.add(old)
    driver.step()
    driver.step()
    driver.tokens.clear()
    driver.engine.cancel(old.key)
    assert driver.run(new) == [expected]


def test_a_slot_whose_last_user_has_ended_is_filled_in_the_next_step(ahead: Make, digests: list[str]) -> None:
    driver = ahead(max_loras=1)
    driver.engine.pager.pin(digests[1], Tier.HOST)
    driver.engine.add(greedy("first", range(3, 10), digest=digests[0], max_new_tokens=5))
    driver.until(lambda: digests[1] in driver.engine.pager.host and (0, "first") in driver.tokens)
    driver.engine.add(greedy("second", range(3, 10), digest=digests[1], max_new_tokens=5))
    while (0, "first") not in driver.finished:
        driver.step()
    driver.step()
    assert digests[1] in driver.engine.batcher.slots.digests


def test_draining_lets_what_runs_go_on(ahead: Make) -> None:
    driver = ahead()
    driver.engine.add(greedy("x", range(3, 10), max_new_tokens=20))
    driver.step()
    driver.engine.drain()
    driver.engine.add(greedy("late", range(3, 10)))
    driver.until(lambda: bool(driver.finished))
    assert len(driver.token_ids((0, "x"))) == 20
    assert driver.rejected[0, "late"].reason == "DRAINING"


@pytest.mark.parametrize("where", ["launch_forward", "launch_draw", "collect"])
def test_a_failed_step_takes_its_own_sequences_only(
    ahead: Make, digests: list[str], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A sequence that joins in the step after the one that fails on the way back goes on."""
    driver = ahead()
    [expected] = ahead().run(greedy("joins", range(40, 60), digest=digests[1]))
    if where == "collect":  # before anything runs, which might end while this is loaded
        driver.engine.prefetch(digests[1])
        driver.until(lambda: digests[1] in driver.engine.pager.host)
    driver.engine.add(greedy("in", range(3, 20), digest=digests[0]))
    driver.until(lambda: (0, "in") in driver.tokens)
    if where == "collect":
        driver.engine.add(greedy("joins", range(40, 60), digest=digests[1]))
    with monkeypatch.context() as patch:
        patch.setattr(driver.engine._runner, where, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError) as error:
            driver.engine.step()
    driver.take(driver.engine.fail(error.value))
    assert driver.rejected.pop((0, "in")).reason == "INTERNAL"
    if where != "collect":
        driver.engine.add(greedy("joins", range(40, 60), digest=digests[1]))
    driver.until(lambda: bool(driver.finished))
    assert driver.token_ids((0, "joins")) == expected
    assert not driver.rejected and idle(driver)


def test_a_prompt_alone_is_planned_ahead(ahead: Make) -> None:
    """Nobody waits: its second token is on its way when the first one is told."""
    driver = ahead()
    driver.engine.add(greedy("alone", range(3, 20)))
    driver.step()
    events = driver.step()
    assert len(driver.tokens[0, "alone"]) == 1
    assert events.runs


def test_a_burst_whose_first_prompt_is_cancelled_goes_on(ahead: Make, digests: list[str]) -> None:
    """The step under way has nobody any more."""
    expected = ahead().run(*(greedy(f"{n}", range(3 + n, 20), digest=digests[n % 2]) for n in range(4)))
    driver = ahead()
    first = greedy("first", range(3, 20), digest=digests[0])
    driver.engine.add(first)
    driver.step()
    rest = [greedy(f"{n}", range(3 + n, 20), digest=digests[n % 2]) for n in range(4)]
    for dispatch in rest:
        driver.engine.add(dispatch)
    driver.engine.cancel(first.key)
    driver.until(lambda: len(driver.finished) == 4)
    assert [driver.token_ids(dispatch.key) for dispatch in rest] == expected
    assert first.key not in driver.tokens and idle(driver)


def test_prompts_that_keep_arriving_hold_up_no_stream(ahead: Make) -> None:
    """One more waits at every beat."""
    driver = ahead()
    driver.engine.add(greedy("stream", range(3, 20), max_new_tokens=20))
    beats = 0
    while (0, "stream") not in driver.finished:
        driver.engine.add(greedy(f"{beats}", range(3, 12), max_new_tokens=1))
        driver.step()
        beats += 1
    # Launched, then a token a beat, each step landing behind the next one's launch.
    assert beats == 21


@pytest.mark.parametrize("where", ["collect", "commit"])
def test_what_the_step_behind_a_failed_one_draws_is_not_told(
    ahead: Make, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """It would stand where the lost token belongs: lost on its way from the device, or before it was told."""
    driver = ahead()
    driver.engine.add(greedy("x", range(3, 20)))
    driver.until(lambda: (0, "x") in driver.tokens and bool(driver.engine._flights))
    told = driver.token_ids((0, "x"))
    owner: object = driver.engine._runner if where == "collect" else driver.engine.batcher
    original, failures = getattr(owner, where), iter([ZeroDivisionError()])

    def fail_once(*arguments: object) -> object:
        for failure in failures:
            raise failure
        return original(*arguments)

    monkeypatch.setattr(owner, where, fail_once)
    with pytest.raises(ZeroDivisionError) as error:
        driver.engine.step()
    driver.take(driver.engine.fail(error.value))
    assert driver.rejected.pop((0, "x")).reason == "INTERNAL"
    assert driver.token_ids((0, "x")) == told
    assert idle(driver)


def test_a_failed_launch_of_what_ends_meanwhile_rejects_nobody_who_waits(
    ahead: Make, digests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = ahead().run(greedy("free", range(3, 18)))[0]
    driver = ahead()
    stop = StopRules(stop_token_ids=frozenset({answer[1]}))
    driver.engine.add(greedy("x", range(3, 18), stop=stop))
    driver.until(lambda: (0, "x") in driver.tokens and bool(driver.engine._flights))
    monkeypatch.setattr(driver.engine.pager, "collect", lambda *_: [])  # its adapter is not there yet
    driver.engine.add(greedy("waits", range(40, 60), digest=digests[1]))
    with monkeypatch.context() as patch:
        patch.setattr(driver.engine._runner, "launch_forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError) as error:
            driver.engine.step()
    driver.take(driver.engine.fail(error.value))
    assert (0, "x") in driver.finished and not driver.rejected
    monkeypatch.undo()
    driver.until(lambda: (0, "waits") in driver.finished)
