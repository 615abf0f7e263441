"""Answers that are held to constraints, allowed tokens and bad words, in an engine."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter_store import DiskStore, ModelSpec
from executor.batch.sampling import SamplingParams
from executor.batch.sequence import FinishReason, StopRules
from lorafleet.constraints.constraint import Constraint
from lorafleet.constraints.tokens import read_tokenizer
from tests.support.adapters.peft import make_adapter
from tests.support.engines.driver import MODES, Driver, greedy, make_driver
from tests.support.engines.guided import (
    CONSTRAINTS,
    EOS,
    accepts,
    guided,
    make_guided_base,
    mixed,
)
from tests.support.stores.media import versions_in

Make = Callable[..., Driver]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_guided_base(tmp_path_factory.mktemp("guided"))


@pytest.fixture(scope="module")
def store(base: Path, tmp_path_factory: pytest.TempPathFactory) -> DiskStore:
    store, spec = DiskStore(tmp_path_factory.mktemp("store")), ModelSpec.from_folder(base)
    for seed in range(3):
        folder = make_adapter(tmp_path_factory.mktemp("adapter"), base, seed=seed, rank=4)
        store.put(folder, "default", f"g{seed}", spec)
    return store


@pytest.fixture(scope="module")
def digests(store: DiskStore) -> list[str]:
    return [version.digest for version in versions_in(store, "default")]


@pytest.fixture(params=MODES.values(), ids=MODES.keys())
def make(request: pytest.FixtureRequest, base: Path, store: DiskStore) -> Iterator[Make]:
    drivers = []

    def one(**settings: Any) -> Driver:
        drivers.append(make_driver(str(base), store, **({"async_scheduling": request.param} | settings)))
        return drivers[-1]

    yield one
    for driver in drivers:
        driver.engine.close()


@pytest.fixture(scope="module")
def text_of(base: Path) -> Callable[[list[int]], str]:
    tokenizer = read_tokenizer(base)
    return lambda tokens: str(tokenizer.decode(tokens))


@pytest.fixture(scope="module")
def alone(base: Path, store: DiskStore, digests: list[str]) -> list[tuple[list[int], FinishReason]]:
    driver = make_driver(str(base), store, async_scheduling="false")
    for dispatch in mixed(digests):
        driver.run(dispatch)
    driver.engine.close()
    return [(driver.token_ids(each.key), driver.finished[each.key]) for each in mixed(digests)]


def test_answers_are_what_was_asked_for(
    alone: list[tuple[list[int], FinishReason]], digests: list[str], base: Path, text_of: Callable[..., str]
) -> None:
    answers = {each.key[1]: answer for each, answer in zip(mixed(digests), alone, strict=True)}
    for name, (tokens, reason) in answers.items():
        kind = name.rstrip("0123456789")
        if kind in CONSTRAINTS:
            assert accepts(base, CONSTRAINTS[kind], tokens), name
        if reason is FinishReason.STOP and kind in ("schema", "object"):
            assert isinstance(json.loads(text_of(tokens)), dict)
        if kind == "regex":
            assert re.fullmatch("[a-f]{3,5}(-[0-9]{2}){2}", text_of(tokens))
        if kind == "choice":
            assert text_of(tokens) in CONSTRAINTS["choice"].choices
    assert {reason for _, reason in answers.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    assert set(answers["allowed"][0]) <= set(range(100, 120))
    assert 7 not in answers["bad"][0]


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.permutations(range(13)),
    stagger=st.integers(0, 3),
    cancels=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=3),
    chunk=st.sampled_from([13, 64]),
    blocks=st.sampled_from([12, 64]),
    mode=st.sampled_from(list(MODES.values())),
)
def test_neighbours_slots_and_preemption_change_no_token(
    base: Path,
    store: DiskStore,
    digests: list[str],
    alone: list[tuple[list[int], FinishReason]],
    order: list[int],
    stagger: int,
    cancels: list[tuple[int, int]],
    chunk: int,
    blocks: int,
    mode: str,
) -> None:
    driver = make_driver(
        str(base),
        store,
        async_scheduling=mode,
        max_loras=2,
        max_batched_tokens=chunk,
        max_seats=13,
        num_kv_blocks=blocks,
        adapter_aging=0.01,
    )
    wanted, beat, cancelled = mixed(digests), 0, set()

    def step() -> None:
        nonlocal beat
        for when, number in cancels:
            if when == beat and wanted[number].key not in driver.finished:
                driver.engine.cancel(wanted[number].key)
                cancelled.add(number)
        beat += 1
        driver.step()

    for number in order:
        driver.engine.add(wanted[number])
        for _ in range(stagger):
            step()
    while beat <= 41:
        step()
    driver.until(lambda: not driver.engine.batcher.sequences)
    driver.step()
    driver.step()
    driver.engine.close()
    assert not driver.rejected
    for number, (tokens, reason) in enumerate(alone):
        got = driver.token_ids(wanted[number].key)
        if number in cancelled and wanted[number].key not in driver.finished:
            assert got == tokens[: len(got)]
        else:
            assert (got, driver.finished[wanted[number].key]) == (tokens, reason)
    assert driver.engine.batcher.blocks.num_free == blocks and driver.engine.pager.users() == {}
    assert not driver.engine._guides._guides and not driver.engine._guides._waiting


def test_a_constraint_goes_on_where_the_answer_was(
    make: Make, alone: list[tuple[list[int], FinishReason]], digests: list[str]
) -> None:
    driver = make()
    for dispatch, (tokens, reason) in zip(mixed(digests), alone, strict=True):
        for known in {1, len(tokens) // 2, len(tokens) - 1}:
            key = (0, f"{dispatch.key[1]} {known}")
            again = replace(dispatch, key=key, output_token_ids=tuple(tokens[:known]))
            assert driver.run(again) == [tokens[known:]]
            assert driver.finished[again.key] is reason


def test_an_answer_that_is_whole_already_ends_at_once(make: Make) -> None:
    driver = make()
    [tokens] = driver.run(guided("x", CONSTRAINTS["choice"]))
    again = guided("again", CONSTRAINTS["choice"], output_token_ids=tuple(tokens))
    assert driver.run(again) == [[]]
    assert driver.finished[again.key] is FinishReason.STOP


def test_where_more_could_follow_the_ends_may_come_and_nowhere_before(
    make: Make, base: Path, text_of: Callable[..., str]
) -> None:
    driver, digits = make(), Constraint.regex("[0-9]{4,}")
    stop = 300
    rules = StopRules(max_new_tokens=30, stop_token_ids=frozenset({stop}))
    for end in (EOS, stop):
        wish = SamplingParams(temperature=0, logit_bias=((end, 1e4),))
        [tokens] = driver.run(guided(f"{end}", digits, stop=rules, sampling=wish))
        assert tokens[-1] == end and {EOS, stop}.isdisjoint(tokens[:-1])
        assert accepts(base, digits, tokens[:-1]) and len(text_of(tokens[:-1])) >= 4
        later = replace(rules, min_new_tokens=20)
        [longer] = driver.run(guided(f"{end} later", digits, stop=later, sampling=wish))
        assert len(longer) == 21 and longer[-1] == end


def test_what_is_whole_ends_before_min_new_tokens(make: Make) -> None:
    """Also where only the end token says so: nothing else may follow."""
    rules = StopRules(max_new_tokens=30, min_new_tokens=25)
    driver = make()
    [tokens] = driver.run(guided("x", Constraint.regex("[0-9]{4}"), stop=rules))
    assert len(tokens) <= 5
    assert driver.finished[0, "x"] is FinishReason.STOP


def test_a_stop_token_that_is_part_of_the_text_ends_it_only_where_it_is_whole(make: Make, base: Path) -> None:
    brace = read_tokenizer(base).token_to_id("}")
    rules = StopRules(max_new_tokens=40, stop_token_ids=frozenset({brace}))
    driver = make()
    driver.engine.add(guided("x", CONSTRAINTS["schema"], stop=rules))
    driver.until(lambda: bool(driver.finished or driver.rejected))
    assert brace not in driver.token_ids((0, "x"))
    # Without it no object closes: there is nothing else to draw, or it goes on to its length.
    if driver.rejected:
        assert driver.rejected[0, "x"].reason == "CONSTRAINT_FAILED"


def test_allowed_tokens_that_a_constraint_does_not_allow_fail_alone(make: Make) -> None:
    driver = make()
    [expected] = make().run(greedy("good", range(3, 20)))
    driver.engine.add(guided("bad", CONSTRAINTS["regex"], allowed_token_ids=(300, 301)))
    driver.engine.add(greedy("good", range(3, 20)))
    driver.until(lambda: bool(driver.rejected and driver.finished))
    rejection = driver.rejected[0, "bad"]
    assert (rejection.reason, rejection.code.name) == ("CONSTRAINT_FAILED", "FAILED_PRECONDITION")
    assert "allowed_token_ids" in rejection.message and not rejection.retryable
    assert driver.token_ids((0, "good")) == expected


def test_a_row_over_its_limit_fails_and_others_draw_on(make: Make) -> None:
    """The more there is of it, the more ways there are to read it."""
    driver = make()
    [expected, schema] = make().run(greedy("good", range(3, 20)), guided("schema", CONSTRAINTS["schema"]))
    ways = " | ".join(" ".join("s" * count) for count in range(2, 9))
    hostile = Constraint.lark(f'start: s\ns: "a" | {ways}')
    endless = SamplingParams(temperature=0, logit_bias=((EOS, -1e4),))
    driver.engine.add(guided("bad", hostile, sampling=endless, max_new_tokens=400))
    driver.engine.add(greedy("good", range(3, 20)))
    driver.engine.add(guided("schema", CONSTRAINTS["schema"]))
    driver.until(lambda: len(driver.rejected) + len(driver.finished) == 3)
    assert driver.token_ids((0, "good")) == expected and driver.token_ids((0, "schema")) == schema
    rejection = driver.rejected[0, "bad"]
    assert (rejection.reason, rejection.code.name) == ("CONSTRAINT_FAILED", "FAILED_PRECONDITION")


def test_a_constraint_that_does_not_compile_fails_alone(make: Make) -> None:
    driver = make()
    driver.engine.add(guided("bad", Constraint.lark("start: nowhere")))
    driver.until(lambda: bool(driver.rejected))
    assert driver.rejected[0, "bad"].reason == "CONSTRAINT_FAILED"
    assert "nowhere" in driver.rejected[0, "bad"].message
    driver.rejected.clear()
    driver.run(guided("good", CONSTRAINTS["choice"]))


def test_log_probabilities_are_of_the_whole_vocabulary_unless_asked_otherwise(make: Make) -> None:
    allowed = tuple(range(100, 110))
    plain = greedy("plain", range(3, 20), logprobs=20, allowed_token_ids=allowed)
    masked = replace(plain.sampling, masked_logprobs=True)
    driver = make()
    driver.run(plain, replace(plain, key=(0, "masked"), sampling=masked), greedy("free", range(3, 20)))
    free, among = driver.tokens[0, "plain"][0].token, driver.tokens[0, "masked"][0].token
    assert free.token_id == among.token_id
    assert len(free.top) == 20 and {token for token, _ in among.top} == set(allowed)
    assert free.logprob < among.logprob < 0


@pytest.mark.parametrize("times", [1, 2])
def test_a_draw_that_fails_takes_its_own_sequences_only(
    base: Path, store: DiskStore, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Owed to a running step, it fails at the next beat, and perhaps once more."""
    driver = make_driver(str(base), store, async_scheduling="true")
    driver.engine.add(guided("in", CONSTRAINTS["schema"]))
    driver.until(lambda: (0, "in") in driver.tokens)
    original, left = driver.engine._runner.launch_draw, iter(range(times))

    def fail(*arguments: Any) -> Any:
        if next(left, None) is not None:
            raise ZeroDivisionError
        return original(*arguments)

    with mock.patch.object(driver.engine._runner, "launch_draw", fail):
        with pytest.raises(ZeroDivisionError) as error:
            driver.step()
        driver.take(driver.engine.fail(error.value))
    assert driver.rejected.pop((0, "in")).reason == "INTERNAL"
    driver.run(guided("next", CONSTRAINTS["schema"]))
    driver.engine.close()
    assert driver.engine.batcher.blocks.num_free == 64


def test_an_executor_without_a_tokenizer_says_so(tiny_base: Path, tiny_store: DiskStore) -> None:
    driver = make_driver(str(tiny_base), tiny_store)
    assert not driver.engine.info.knows_constraints
    driver.engine.add(guided("x", CONSTRAINTS["choice"], range(3, 10)))
    driver.step()
    assert driver.rejected[0, "x"].reason == "INVALID_REQUEST"
    driver.rejected.clear()
    driver.run(greedy("y", range(3, 10), allowed_token_ids=(5, 6)))
    driver.engine.close()
    assert set(driver.token_ids((0, "y"))) <= {5, 6}
