"""Steps as long as the engine's pace says, and what their times tell it. The clock moves as a step says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapter_store import DiskStore
from executor.adapters.residency import Tier
from executor.batch.batcher import StepPlan
from executor.build import build_engine
from executor.config import ExecutorConfig
from executor.step.model_runner import Forward, Launched
from tests.support.engines.driver import SMALL, Driver, greedy, in_both_modes
from tests.support.engines.set_pace import SetPace

Make = Callable[..., Driver]


@pytest.fixture
def timed(tiny_base: Path, tiny_store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> "Callable[[], Timed]":
    return lambda: Timed(tiny_base, tiny_store, monkeypatch)


class Timed:
    """An engine one step ahead whose host and device take what `host` and `device` say of a step's rows."""

    def __init__(self, model: Path, store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.host: Callable[[int], float] = lambda rows: 0.001
        self.device: Callable[[int], float] = lambda rows: 0.005
        self.observed: list[tuple[int, bool, float]] = []
        self.rows: list[int] = []
        self._free = 0.0  # when the device has done all it was given
        self._ends: list[float] = []
        settings: dict[str, Any] = {**SMALL, "async_scheduling": "true", "max_step_ms": -1}
        settings |= {"max_batched_tokens": 256, "prefix_cache": False}
        config = ExecutorConfig(model=str(model), **settings)
        self.engine = build_engine(config, store, clock=lambda: self.now)
        runner, times = self.engine._runner, self.engine._pace.times
        launch, collect, observe = runner.launch_forward, runner.collect, times.observe

        def launched(plan: StepPlan) -> Forward:
            rows = sum(plan.num_tokens.values())
            self.rows.append(rows)
            self.now += self.host(rows)
            self._free = max(self._free, self.now) + self.device(rows)
            self._ends.append(self._free)
            return launch(plan)

        def collected(step: Launched) -> Any:
            self.now = max(self.now, self._ends.pop(0))
            return collect(step)

        def observed(rows: int, decode: bool, seconds: float) -> None:
            self.observed.append((rows, decode, round(seconds, 6)))
            observe(rows, decode, seconds)

        monkeypatch.setattr(runner, "launch_forward", launched)
        monkeypatch.setattr(runner, "collect", collected)
        monkeypatch.setattr(times, "observe", observed)

    def add(self, name: str, prompt: int, max_new_tokens: int = 100) -> None:
        self.engine.add(greedy(name, (3 + n % 50 for n in range(prompt)), max_new_tokens=max_new_tokens))


def test_a_step_takes_what_the_device_takes(timed: Callable[[], Timed]) -> None:
    world = timed()
    world.device = lambda rows: 0.002 + 0.0001 * rows
    world.add("a", 30)
    for _ in range(4):
        world.engine.step()
    assert world.observed == [(30, False, 0.005), (1, True, 0.0021), (1, True, 0.0021)]


def test_a_step_takes_what_the_host_takes_to_launch_it(timed: Callable[[], Timed]) -> None:
    world = timed()
    world.host = lambda rows: 0.02
    world.add("a", 30)
    for _ in range(5):
        world.engine.step()
    assert {seconds for _, _, seconds in world.observed} == {0.02}


def test_the_launch_of_a_step_is_not_held_against_the_one_before_it(timed: Callable[[], Timed]) -> None:
    world = timed()
    world.host = lambda rows: 0.05 if rows > 100 else 0.001
    world.add("a", 3)
    for _ in range(6):
        world.engine.step()
    world.add("b", 200)
    for _ in range(12):
        world.engine.step()
    decode = [seconds for _, decode, seconds in world.observed if decode]
    assert len(decode) > 6 and max(decode) < 0.01


def test_while_others_decode_steps_keep_to_the_bound_that_was_measured(timed: Callable[[], Timed]) -> None:
    """Each row takes 0.2 ms and a step of decoding 4: 2.5 of those are 50 rows; the least is 32 tokens."""
    world = timed()
    world.device = lambda rows: max(0.004, 0.0002 * rows)
    for name in "abcd":
        world.add(name, 3)
    for _ in range(8):
        world.engine.step()
    world.rows.clear()
    for name in "efg":
        world.add(name, 200, 1)
    while len(world.engine.batcher.sequences) > 4:
        world.engine.step()
    assert max(world.rows) <= 4 + 60
    assert len(world.rows) >= 10
    world.engine.close()


def test_a_burst_on_an_idle_engine_is_one_step(timed: Callable[[], Timed]) -> None:
    world = timed()
    for number in range(8):
        world.add(str(number), 30)
    world.engine.step()
    assert world.rows == [240]


@in_both_modes
def test_what_decodes_is_in_every_step_however_many_prompts_come(make_engine: Make) -> None:
    driver = make_engine()
    driver.engine._pace = SetPace(3)
    for number in range(4):
        driver.engine.add(greedy(str(number), range(3, 8), max_new_tokens=30))
    driver.step()
    for number in range(4, 12):
        driver.engine.add(greedy(str(number), range(3, 40)))
        driver.step()
        running = driver.engine.batcher.running[:4]
        assert all(each.in_flight or each.computed == each.length - 1 for each in running)
    driver.until(lambda: len(driver.finished) == 12)


@in_both_modes
def test_a_page_in_that_fails_takes_those_who_have_begun_without_a_token(
    make_engine: Make, digests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their slot is not filled. Who has begun in a slot that is goes on."""
    expected = make_engine().run(greedy("goes on", range(3, 30), digest=digests[0]))
    driver = make_engine()
    driver.engine._pace = SetPace(4)
    for digest in digests[:2]:
        driver.engine.pager.pin(digest, Tier.HOST)
    driver.until(lambda: {*digests[:2]} <= {*driver.engine.pager.host})
    driver.engine.add(greedy("decodes", range(3, 8), max_new_tokens=40))
    driver.until(lambda: (0, "decodes") in driver.tokens)
    load, loads = driver.engine.pager._adapters.load, list[int]()

    def second_fails(slot: int, image: Any) -> None:
        loads.append(slot)
        if len(loads) == 2:
            raise RuntimeError("the copy failed")
        load(slot, image)

    monkeypatch.setattr(driver.engine.pager._adapters, "load", second_fails)
    driver.engine.add(greedy("has tokens", range(3, 40), digest=digests[0]))
    driver.engine.add(greedy("goes on", range(3, 30), digest=digests[0]))
    driver.engine.add(greedy("is lost", range(3, 40), digest=digests[1]))
    with pytest.raises(RuntimeError, match="the copy failed") as error:
        driver.engine.step()
    driver.take(driver.engine.fail(error.value))
    assert {name for _, name in driver.rejected} == {"decodes", "has tokens", "is lost"}
    driver.until(lambda: (0, "goes on") in driver.finished)
    assert driver.token_ids((0, "goes on")) == expected[0]
    driver.rejected.clear()
    again = driver.run(greedy("again", range(3, 40), digest=digests[1]))
    assert again == make_engine().run(greedy("again", range(3, 40), digest=digests[1]))


def test_the_status_tells_how_fast_steps_are(timed: Callable[[], Timed]) -> None:
    world = timed()
    world.add("a", 300)
    assert world.engine.step().status.rates.token_interval == 0.0
    for _ in range(20):
        rates = world.engine.step().status.rates
    assert abs(rates.token_interval - 0.005) < 0.0005
    assert abs(rates.tokens - 200) < 20
    assert rates.prompt_tokens > 0
    assert 60 < rates.answer_tokens_left <= 100
