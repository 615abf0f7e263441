"""What must not change a token: arrivals, slots, chunk sizes, bounds on steps, preemptions, batch mates."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter_store import AdapterStore, DiskStore, ModelSpec
from tests.support.adapters.oracle import Oracle, OracleRun
from tests.support.adapters.peft import DENSE, load_base, make_adapter, make_base
from tests.support.engines.driver import Driver, greedy, make_driver
from tests.support.engines.set_pace import SetPace

NUM_TOKENS = 16
NEAR_TIE = 1e-3
RANKS = {"one": 1, "four": 4, "sixteen": 16}


@dataclass(frozen=True)
class Case:
    name: str
    digest: str
    prompt: tuple[int, ...]
    truth: OracleRun

    @property
    def comparable(self) -> int:
        """Tokens before the first near tie, beyond which both answers would be right."""
        ties = (i for i, gap in enumerate(self.truth.gaps) if gap <= NEAR_TIE)
        return next(ties, NUM_TOKENS)


@dataclass
class World:
    model: Path
    store: AdapterStore
    cases: list[Case]
    compared: int = 0
    skipped: int = 0
    preempted: int = 0


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("invariance")
    model = make_base(folder / "model", "llama", std=0.15)
    base, oracle, draw = load_base(model), Oracle(model), random.Random(11)
    store, spec = DiskStore(folder / "store"), ModelSpec.from_folder(model)
    adapters = {
        name: make_adapter(folder / name, base, seed=rank, rank=rank, targets=DENSE)
        for name, rank in RANKS.items()
    }
    digests = {name: store.put(path, "default", name, spec).digest for name, path in adapters.items()}
    cases = []
    for name in ("base", *RANKS) * 2:
        prompt = tuple(draw.randrange(3, 128) for _ in range(draw.choice((1, 7, 16, 33))))
        truth = oracle.greedy(adapters.get(name), list(prompt), NUM_TOKENS)
        cases.append(Case(name, digests.get(name, ""), prompt, truth))
    world = World(model, store, cases)
    yield world
    assert world.preempted > 0
    assert world.skipped < world.compared / 10, f"near ties: {world.skipped} of {world.compared} tokens"


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.permutations(range(8)),
    pauses=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    max_loras=st.sampled_from([1, 2, 8]),
    max_batched_tokens=st.sampled_from([8, 11, 32, 256]),
    num_kv_blocks=st.sampled_from([14, 20, 200]),
    prefix_cache=st.booleans(),
    ahead=st.sampled_from(["true", "false"]),
    room=st.sampled_from([1, 9, 512]),
)
def test_scheduling_changes_no_token(
    world: World,
    order: list[int],
    pauses: list[int],
    max_loras: int,
    max_batched_tokens: int,
    num_kv_blocks: int,
    prefix_cache: bool,
    ahead: str,
    room: int,
) -> None:
    driver = make_driver(
        str(world.model),
        world.store,
        max_loras=max_loras,
        max_seats=8,
        max_batched_tokens=max_batched_tokens,
        num_kv_blocks=num_kv_blocks,
        block_size=4,
        prefix_cache=prefix_cache,
        adapter_aging=0.01,
        async_scheduling=ahead,
        torch_threads=1,
    )
    driver.engine._pace = SetPace(room)
    cases = [world.cases[index] for index in order]
    try:
        outputs = run(driver, list(zip(pauses, cases, strict=True)))
    finally:
        driver.engine.close()
    world.preempted += int(driver.metric("preemptions_total"))
    for case, output in zip(cases, outputs, strict=True):
        limit = case.comparable
        assert output[:limit] == case.truth.tokens[:limit], case.name
        assert len(output) == NUM_TOKENS
        world.compared += NUM_TOKENS
        world.skipped += NUM_TOKENS - limit


def run(driver: Driver, arrivals: list[tuple[int, Case]]) -> list[list[int]]:
    """Add each case some steps after the one before; returns the tokens of each."""
    for index, (pause, case) in enumerate(arrivals):
        for _ in range(pause):
            driver.step()
        dispatch = greedy(str(index), case.prompt, digest=case.digest, max_new_tokens=NUM_TOKENS)
        driver.engine.add(dispatch)
    driver.until(lambda: len(driver.finished) == len(arrivals))
    return [driver.token_ids((0, str(index))) for index in range(len(arrivals))]
