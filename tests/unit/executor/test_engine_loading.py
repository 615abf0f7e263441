"""Adapters on their way into the engine: what loads, waits or fails touches nobody else."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from adapter_store import DiskStore, ModelSpec, StoreUnavailable, Weights
from tests.support.adapters.peft import make_adapter
from tests.support.engines.driver import PROMPTS, Driver, greedy, in_both_modes
from tests.unit.executor.loading_checks import twenty_loads_leave_sixteen_streams_alone

Make = Callable[..., Driver]
pytestmark = in_both_modes


@pytest.mark.parametrize("images", [1, 2])
def test_little_host_memory_serves_every_adapter_in_turn(
    make_engine: Make, digests: list[str], images: int
) -> None:
    dispatches = [greedy(f"{i}", PROMPTS[i % 4], digest=d) for i, d in enumerate([*digests, *digests])]
    roomy = make_engine()
    expected = roomy.run(*dispatches)
    driver = make_engine(host_memory_bytes=images * roomy.engine.pager._adapters.nbytes_per_slot)
    assert driver.run(*dispatches) == expected
    assert driver.engine.pager.host.num_bytes <= driver.engine.pager.host.max_bytes


def test_loads_and_prefetches_do_not_disturb_what_runs(make_engine: Make, digests: list[str]) -> None:
    running = [greedy(f"{i}", PROMPTS[i], digest=digests[i], max_new_tokens=60) for i in (0, 1)]
    expected = make_engine().run(*running)
    driver = make_engine()
    for dispatch in running:
        driver.engine.add(dispatch)
    for number in range(40):
        driver.step()
        driver.engine.prefetch(digests[2 + number % 3])
        driver.engine.prefetch(f"sha256:{'0' * 64}")
        if number % 7 == 0:
            driver.engine.drop(digests[2 + number % 3])
    driver.until(lambda: len(driver.finished) == 2)
    assert [driver.token_ids(d.key) for d in running] == expected


class HeldStore(DiskStore):
    """Gives an adapter out once its gate is open."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()

    def open(self, digest: str) -> Weights:
        self.gate.wait(30)
        return super().open(digest)


def test_others_decode_while_adapters_load(make_engine: Make, digests: list[str], store_folder: Path) -> None:
    store = HeldStore(store_folder)
    driver = make_engine(store_object=store)
    driver.engine.add(greedy("cold", PROMPTS[1], digest=digests[0]))
    [tokens] = driver.run(greedy("base", PROMPTS[0], max_new_tokens=60))
    assert len(tokens) == 60 and (0, "cold") not in driver.tokens
    store.gate.set()
    driver.until(lambda: (0, "cold") in driver.finished)


def test_who_lacks_only_full_heads_waits_for_them_and_is_not_handed_back(
    make_engine: Make, tiny_base: Path, tiny_store: DiskStore, tmp_path: Path
) -> None:
    """Schedulers do not know which are in use, so they send there, too, while a slot is free."""
    spec = ModelSpec.from_folder(tiny_base)
    heads = [
        tiny_store.put(
            make_adapter(tmp_path / f"{n}", tiny_base, seed=n, modules_to_save=["lm_head"]),
            "heads",
            f"h{n}",
            spec,
        ).digest
        for n in range(3)
    ]
    driver = make_engine(max_loras=4, max_full_heads=1, num_kv_blocks=128)
    dispatches = [greedy(f"{n}", PROMPTS[n], digest=digest) for n, digest in enumerate([*heads, ""])]
    together = driver.run(*dispatches)
    assert together == [driver.run(replace(each, key=(1, each.request_id)))[0] for each in dispatches]


def test_twenty_loads_some_of_them_broken_leave_sixteen_streams_alone(
    make_engine: Make, digests: list[str], strangers: list[str]
) -> None:
    alone = {"max_loras": 4, "num_kv_blocks": 256}
    crowded = {"max_loras": 5, "num_kv_blocks": 256, "max_seats": 36}
    twenty_loads_leave_sixteen_streams_alone(make_engine, alone, crowded, digests, strangers, num_tokens=40)


def test_a_failed_load_fails_those_who_wait_and_nobody_else(make_engine: Make, digests: list[str]) -> None:
    driver = make_engine()
    unknown = f"sha256:{'0' * 64}"
    bad = [greedy(f"bad{i}", PROMPTS[i], digest=unknown) for i in range(3)]
    good = [greedy(f"good{i}", PROMPTS[i], digest=digests[i % 2]) for i in range(3)]
    for dispatch in (x for pair in zip(bad, good, strict=True) for x in pair):
        driver.engine.add(dispatch)
    driver.engine.cancel(bad[1].key)
    driver.until(lambda: len(driver.finished) == 3 and len(driver.rejected) == 2)
    assert {r.reason for r in driver.rejected.values()} == {"ADAPTER_NOT_FOUND"}
    assert driver.rejected[bad[0].key].retryable is False
    assert unknown not in driver.engine.pager.users()


def test_a_digest_that_is_none_is_no_bug_of_ours(make_engine: Make) -> None:
    driver = make_engine()
    driver.engine.add(greedy("bad", PROMPTS[0], digest="support@latest"))
    driver.until(lambda: bool(driver.rejected))
    rejection = driver.rejected[0, "bad"]
    assert (rejection.reason, rejection.code.name) == ("INVALID_REQUEST", "INVALID_ARGUMENT")
    assert "support@latest" in rejection.message


class FlakyStore(DiskStore):
    """Unavailable until `away` is empty; each open takes one out."""

    def __init__(self, root: Path, away: list[Exception]) -> None:
        super().__init__(root)
        self.away = away

    def open(self, digest: str) -> Weights:
        if self.away:
            raise self.away.pop()
        return super().open(digest)


def test_a_store_in_trouble_is_a_retryable_end_and_is_asked_less_often(
    make_engine: Make, digests: list[str], store_folder: Path
) -> None:
    store = FlakyStore(store_folder, [StoreUnavailable("the disk is away")])
    now = 0.0
    driver = make_engine(store_object=store, clock=lambda: now)
    driver.engine.add(greedy("first", PROMPTS[0], digest=digests[0]))
    driver.until(lambda: bool(driver.rejected))
    assert driver.rejected[0, "first"].retryable
    driver.engine.add(greedy("soon", PROMPTS[0], digest=digests[0]))
    driver.step()
    assert driver.rejected[0, "soon"].reason == "STORE_UNAVAILABLE"
    now = 1.0
    driver.rejected.clear()
    driver.run(greedy("later", PROMPTS[0], digest=digests[0]))
