"""What the engine tells of the copies that it holds, and how long it keeps them."""

from collections.abc import Callable

from executor.adapters.residency import Tier
from tests.support.engines.driver import PROMPTS, Driver, greedy, in_both_modes

Make = Callable[..., Driver]
pytestmark = in_both_modes


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
