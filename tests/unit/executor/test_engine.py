import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter_store import AdapterNotFound, DiskStore, ModelSpec
from executor.residency import Tier
from executor.sampling import SamplingParams
from executor.sequence import Dispatch, FinishReason, StopRules
from tests.support.adapters import load_adapter, load_base, make_adapter, rewrite
from tests.support.engines import Driver, greedy, make_driver

Make = Callable[..., Driver]
MODES = {"in turn": "false", "ahead": "true"}
PROMPTS = [list(range(start, start + length)) for start, length in ((3, 20), (40, 5), (9, 33), (70, 11))]


@pytest.fixture(params=MODES)
def make_engine(request: pytest.FixtureRequest, make_engine: Make) -> Make:
    """Every test here holds whether steps are planned in turn or one ahead."""
    return partial(make_engine, async_scheduling=MODES[request.param])


def test_greedy_tokens_are_those_of_transformers_and_peft(
    make_engine: Make, digests: list[str], tiny_base: Path, tiny_store: DiskStore, tmp_path: Path
) -> None:
    driver = make_engine()
    dispatches = [greedy(f"{i}", PROMPTS[i % 4], digest=d) for i, d in enumerate(["", *digests])]
    got = driver.run(*dispatches)
    for dispatch, tokens in zip(dispatches, got, strict=True):
        model = load_base(tiny_base)
        if dispatch.digest:
            name = f"a{digests.index(dispatch.digest)}"
            folder = tmp_path / name
            tiny_store.export(_ref(name), folder)
            model = load_adapter(model, folder)
        expected = model.generate(
            torch.tensor([dispatch.prompt_token_ids]), max_new_tokens=16, min_new_tokens=16, do_sample=False
        )
        assert tokens == expected[0, len(dispatch.prompt_token_ids) :].tolist()
    assert driver.metric("page_ins_total") == 5


def _ref(name: str) -> object:
    from adapter_store import Ref

    return Ref.parse(name, "default")


def mixed(digests: list[str]) -> list[Dispatch]:
    """Ten dispatches, greedy and drawn, over base and adapters; some share prompts."""
    choices = ["", *digests[:4]]
    result = []
    for i in range(10):
        dispatch = greedy(f"d{i}", PROMPTS[i % 4], digest=choices[i % 5], max_new_tokens=6 + i)
        if i % 2:
            dispatch = replace(dispatch, sampling=SamplingParams(temperature=1.0, seed=i))
        result.append(dispatch)
    return result


@pytest.fixture(scope="module")
def alone(tiny_base: Path, tiny_store: DiskStore, digests: list[str]) -> list[list[int]]:
    """Each of `mixed` in an engine of its own."""
    results = []
    for dispatch in mixed(digests):
        driver = make_driver(str(tiny_base), tiny_store, max_loras=1)
        results += driver.run(dispatch)
        driver.engine.close()
    return results


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.permutations(range(10)),
    slots=st.sampled_from([1, 2, 8]),
    chunk=st.sampled_from([10, 16, 64]),
    blocks=st.sampled_from([12, 64]),
    stagger=st.integers(0, 3),
    mode=st.sampled_from(list(MODES.values())),
)
def test_neighbours_slots_chunks_and_preemption_change_no_token(
    tiny_base: Path,
    tiny_store: DiskStore,
    digests: list[str],
    alone: list[list[int]],
    order: list[int],
    slots: int,
    chunk: int,
    blocks: int,
    stagger: int,
    mode: str,
) -> None:
    driver = make_driver(
        str(tiny_base),
        tiny_store,
        max_loras=slots,
        max_batched_tokens=chunk,
        max_seats=10,
        num_kv_blocks=blocks,
        adapter_aging=0.01,
        async_scheduling=mode,
    )
    dispatches = mixed(digests)
    for number in order:
        driver.engine.add(dispatches[number])
        for _ in range(stagger):
            driver.step()
    keys = [dispatch.key for dispatch in dispatches]
    driver.until(lambda: all(key in driver.finished for key in keys))
    driver.engine.close()
    assert [driver.token_ids(key) for key in keys] == alone
    assert driver.engine.batcher.blocks.num_free == blocks


def test_preempted_sequences_go_on_where_they_were(make_engine: Make, digests: list[str]) -> None:
    dispatches = [greedy(f"{i}", PROMPTS[i], digest=digests[i], max_new_tokens=24) for i in (0, 1)]
    expected = make_engine(prefix_cache=False).run(*dispatches)
    tight = make_engine(num_kv_blocks=8, prefix_cache=False)
    assert tight.run(*dispatches) == expected
    assert tight.metric("preemptions_total") > 0


def test_prefixes_are_reused_within_one_adapter_only(make_engine: Make, digests: list[str]) -> None:
    prompt = list(range(5, 53))
    plan = ["", digests[3], digests[4], digests[3], ""]
    cold = [make_engine().run(greedy("c", prompt, digest=d))[0] for d in plan]
    driver = make_engine()
    warm = [driver.run(greedy(f"w{i}", prompt, digest=d))[0] for i, d in enumerate(plan)]
    assert warm == cold
    assert [driver.cached[0, f"w{i}"] for i in range(5)] == [0, 0, 0, 40, 40]
    together = driver.run(*(greedy(f"t{i}", prompt, digest=d) for i, d in enumerate(plan)))
    assert together == cold
    salted = driver.run(greedy("s", prompt, cache_salt=b"other"))
    assert salted == cold[:1]
    assert driver.cached[0, "s"] == 0


def test_a_resumed_dispatch_goes_on_after_what_was_delivered(make_engine: Make, digests: list[str]) -> None:
    whole = replace(
        greedy("whole", PROMPTS[0], digest=digests[3]), sampling=SamplingParams(temperature=1.0, seed=11)
    )
    tokens = make_engine().run(whole)[0]
    driver = make_engine()
    rest = driver.run(replace(whole, key=(0, "rest"), output_token_ids=tuple(tokens[:7])))[0]
    assert rest == tokens[7:]
    assert driver.tokens[0, "rest"][0].output_index == 7


def test_one_slot_serves_every_adapter_in_turn_without_leftovers(
    make_engine: Make, digests: list[str]
) -> None:
    cold = {d: make_engine().run(greedy("c", PROMPTS[0], digest=d))[0] for d in digests}
    driver = make_engine(max_loras=1)
    for number, digest in enumerate([digests[4], digests[1], digests[4], digests[2], digests[1], ""]):
        tokens = driver.run(greedy(f"{number}", PROMPTS[0], digest=digest))[0]
        if digest:
            assert tokens == cold[digest]
    base = make_engine().run(greedy("b", PROMPTS[0]))[0]
    assert tokens == base


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


def test_prompt_logprobs_come_once_with_the_first_token(make_engine: Make, tiny_base: Path) -> None:
    prompt = PROMPTS[2]
    driver = make_engine(max_batched_tokens=16)
    driver.run(greedy("warm", prompt), greedy("p", prompt, prompt_logprobs=3, logprobs=2))
    first, second = driver.tokens[0, "p"][:2]
    assert not second.prompt_scores and first.wants_logprobs
    assert [score.token_id for score in first.prompt_scores] == prompt
    with torch.no_grad():
        logprobs = load_base(tiny_base)(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert first.prompt_scores[0].logprob is None
    got = torch.tensor([score.logprob for score in first.prompt_scores[1:]])
    expected = logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    assert [len(score.top) for score in first.prompt_scores] == [0, *[3] * 32]


def test_an_adapter_that_overflows_fails_alone(
    make_engine: Make, tiny_base: Path, tiny_store: DiskStore, tmp_path: Path, digests: list[str]
) -> None:
    expected = make_engine().run(greedy("good", PROMPTS[0], digest=digests[3]), greedy("base", PROMPTS[1]))
    folder = make_adapter(tmp_path / "huge", tiny_base, seed=9)
    rewrite(folder, lambda tensors: {name: tensor * 1e30 for name, tensor in tensors.items()})
    huge = tiny_store.put(folder, "other", "huge", ModelSpec.from_folder(tiny_base)).digest
    driver = make_engine()
    bad, good, base = (
        greedy("bad", PROMPTS[2], digest=huge),
        greedy("good", PROMPTS[0], digest=digests[3]),
        greedy("base", PROMPTS[1]),
    )
    for dispatch in (bad, good, base):
        driver.engine.add(dispatch)
    driver.until(lambda: len(driver.finished) == 2 and len(driver.rejected) == 1)
    assert driver.rejected[bad.key].reason == "INVALID_LOGITS"
    assert [driver.token_ids(good.key), driver.token_ids(base.key)] == expected


def test_penalties_that_leave_nothing_to_draw_are_the_callers_fault(make_engine: Make) -> None:
    """Through validation: a repetition penalty so small that logits overflow."""
    driver = make_engine()
    [expected] = make_engine().run(greedy("good", PROMPTS[1]))
    penalty = SamplingParams(temperature=0, repetition_penalty=1e-40)
    driver.engine.add(greedy("bad", range(128), sampling=penalty))
    driver.engine.add(greedy("good", PROMPTS[1]))
    driver.until(lambda: bool(driver.rejected and driver.finished))
    rejection = driver.rejected[0, "bad"]
    assert (rejection.reason, rejection.code.name) == ("NOTHING_TO_DRAW", "INVALID_ARGUMENT")
    assert driver.token_ids((0, "good")) == expected


def test_a_step_that_raises_fails_its_sequences_and_the_books_balance(
    make_engine: Make, digests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_engine(max_loras=1)
    driver.engine.add(greedy("in", PROMPTS[0], digest=digests[0]))
    driver.until(lambda: bool(driver.tokens))
    driver.engine.add(greedy("waits", PROMPTS[0], digest=digests[1]))
    with monkeypatch.context() as patch:
        patch.setattr(driver.engine._runner._forward_pass, "run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError) as error:
            driver.engine.step()
    driver.take(driver.engine.fail(error.value))
    rejection = driver.rejected[0, "in"]
    assert rejection.reason == "INTERNAL" and "division" not in rejection.message
    driver.until(lambda: (0, "waits") in driver.finished)


def test_the_prefix_cache_holds_nothing_of_a_step_that_failed(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 33 tokens in steps of 16: its second step dies half-way through the layers."""
    driver, prompt = make_engine(max_batched_tokens=16), PROMPTS[2]
    [expected] = make_engine().run(greedy("undisturbed", prompt))
    driver.engine.add(greedy("cut", prompt))
    driver.step()
    with monkeypatch.context() as patch:
        norm = driver.engine._runner._forward_pass._model.model.layers[1].post_attention_layernorm
        patch.setattr(norm, "forward", lambda x: 1 // 0)
        with pytest.raises(ZeroDivisionError) as error:
            driver.engine.step()
    driver.take(driver.engine.fail(error.value))
    del driver.rejected[0, "cut"]
    assert driver.run(greedy("again", prompt)) == [expected]
    assert driver.cached[0, "again"] == 16


def test_residency_is_told_as_differences(make_engine: Make, digests: list[str]) -> None:
    driver = make_engine(max_loras=2)
    driver.engine.prefetch(digests[0])
    deltas = []

    def settled(*places: tuple[str, Tier]) -> bool:
        events = driver.step()
        if events.residency:
            deltas.append(events.residency)
        held = {(c.digest, c.tier) for delta in deltas for c in delta.added}
        held -= {(c.digest, c.tier) for c in deltas[-1].removed} if deltas else set()
        return held == set(places)

    driver.until(lambda: settled((digests[0], Tier.HOST)))
    driver.engine.pin(digests[1], Tier.SLOT)
    both = [(digests[1], Tier.HOST), (digests[1], Tier.SLOT)]
    driver.until(lambda: settled((digests[0], Tier.HOST), *both))
    assert any(copy.pinned and copy.slot == 0 for copy in deltas[-1].added)
    assert [delta.number for delta in deltas] == list(range(1, len(deltas) + 1))
    driver.engine.drop(digests[1])
    events = driver.step()
    assert events.residency is not None
    assert {(c.digest, c.tier) for c in events.residency.removed} == set(both)


def test_slot_hits_and_page_ins_are_counted_by_adapter_as_long_as_it_is_there(
    make_engine: Make, digests: list[str]
) -> None:
    driver = make_engine(max_loras=1)

    def counts(digest: str) -> tuple[float | None, ...]:
        names = ("adapter_page_ins_total", "adapter_slot_hits_total")
        labels = {"digest": digest}
        return tuple(driver.registry.get_sample_value(f"lorafleet_executor_{n}", labels) for n in names)

    first, second = digests[:2]
    driver.run(*(greedy(f"{n}", PROMPTS[n], digest=first) for n in range(3)))
    assert counts(first) == (1, 2)
    driver.run(greedy("base", PROMPTS[0]), greedy("other", PROMPTS[0], digest=second))
    driver.run(greedy("again", PROMPTS[1], digest=first))
    assert (counts(first), counts(second)) == ((2, 2), (1, None))
    assert (driver.metric("page_ins_total"), driver.metric("slot_hits_total")) == (3, 2)
    assert driver.metric("page_in_seconds_count") == 3
    driver.engine.drop(first)
    driver.step()
    assert (counts(first), counts(second)) == ((None, None), (1, None))
    assert driver.metric("page_ins_total") == 3


def test_drop_waits_for_the_last_user(make_engine: Make, digests: list[str]) -> None:
    driver = make_engine()
    expected = make_engine().run(greedy("x", PROMPTS[0], digest=digests[0]))
    driver.engine.add(greedy("x", PROMPTS[0], digest=digests[0]))
    driver.until(lambda: bool(driver.tokens))
    driver.engine.drop(digests[0])
    driver.step()
    assert digests[0] in driver.engine.batcher.slots.digests
    driver.until(lambda: bool(driver.finished))
    assert driver.engine.batcher.slots.digests == {}
    assert [driver.token_ids((0, "x"))] == expected


def test_unknown_digests_raise_in_the_store(tiny_store: DiskStore) -> None:
    with pytest.raises(AdapterNotFound):
        tiny_store.open(f"sha256:{'0' * 64}")
