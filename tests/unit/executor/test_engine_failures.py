"""What fails in a step fails alone."""

from collections.abc import Callable
from pathlib import Path

import pytest

from adapter_store import DiskStore, ModelSpec
from executor.batch.sampling import SamplingParams
from tests.support.adapters.peft import make_adapter, make_base, rewrite
from tests.support.engines.driver import PROMPTS, Driver, greedy, in_both_modes

Make = Callable[..., Driver]
pytestmark = in_both_modes


@pytest.mark.parametrize(("dtype", "factor"), [("float16", 1e4), ("bfloat16", 1e30), ("float32", 1e30)])
def test_an_adapter_that_overflows_fails_alone(
    make_engine: Make,
    tiny_base: Path,
    tiny_store: DiskStore,
    tmp_path: Path,
    digests: list[str],
    dtype: str,
    factor: float,
) -> None:
    alone = make_engine(dtype=dtype)
    expected = alone.run(greedy("good", PROMPTS[0], digest=digests[3]), greedy("base", PROMPTS[1]))
    folder = make_adapter(tmp_path / "huge", tiny_base, seed=9)
    rewrite(folder, lambda tensors: {name: tensor * factor for name, tensor in tensors.items()})
    huge = tiny_store.put(folder, "other", "huge", ModelSpec.from_folder(tiny_base)).digest
    driver = make_engine(dtype=dtype)
    bad, good, base = (
        greedy("bad", PROMPTS[2], digest=huge),
        greedy("good", PROMPTS[0], digest=digests[3]),
        greedy("base", PROMPTS[1]),
    )
    for dispatch in (bad, good, base):
        driver.engine.add(dispatch)
    driver.until(lambda: len(driver.finished) == 2 and len(driver.rejected) == 1)
    rejection = driver.rejected[bad.key]
    assert (rejection.reason, rejection.code.name) == ("INVALID_LOGITS", "FAILED_PRECONDITION")
    assert not rejection.retryable
    assert f"adapter {huge}" in rejection.message and f" {dtype}" in rejection.message
    assert [driver.token_ids(good.key), driver.token_ids(base.key)] == expected


def test_a_base_that_overflows_names_itself(make_engine: Make, tmp_path: Path) -> None:
    driver = make_engine(model=str(make_base(tmp_path / "loud", std=1e3)), dtype="float16")
    driver.engine.add(greedy("base", PROMPTS[1]))
    driver.until(lambda: bool(driver.rejected))
    rejection = driver.rejected[0, "base"]
    assert (rejection.reason, rejection.code.name) == ("INVALID_LOGITS", "FAILED_PRECONDITION")
    assert "base model loud" in rejection.message and " float16" in rejection.message


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
