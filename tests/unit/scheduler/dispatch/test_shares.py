"""Fair shares where not everybody can run everywhere, on virtual time.

Executors `a` take what is usual; what is of rank 64 runs on the special one only, whose one slot it holds.
"""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.dispatch.shares import Shares
from tests.support.services.virtual_executor import STEP_S, VirtualExecutor
from tests.support.services.virtual_scheduler import Asked, VirtualScheduler
from tests.support.services.virtual_time import World

SEATS = 8
TOKENS = 32
TURN = 64 * 0.5 + TOKENS
BOUND = 2 * TURN * (1 + 2 * SEATS)
"""Of virtual tokens between two tenants of weight 1: a turn of each, and what both run."""


class House:
    """Tenants that keep so many requests waiting for as long as they are there."""

    def __init__(
        self, *, slots: int = 6, aging_s: float = 2.0, weights: dict[str, float] | None = None
    ) -> None:
        self.world = World()
        usual = VirtualExecutor(self.world, "a:1", SEATS, slots)
        special = VirtualExecutor(self.world, "special:1", SEATS, 1, max_rank=64)
        self.scheduler = VirtualScheduler(self.world, [usual, special], aging_s=aging_s, weights=weights)
        self.there: dict[str, int] = {}
        self.rng = Random(5)

    def come(self, tenant: str, digest: str, *, rank: int = 8, at_once: int = 3 * SEATS) -> None:
        live: set[int] = set()
        self.there[tenant] = at_once

        def refill() -> None:
            live.difference_update([number for number in live if number in self.world.ended])
            while len(live) < self.there[tenant]:
                tokens = self.rng.randint(TOKENS // 2, TOKENS)  # They do not end all at once.
                live.add(self.scheduler.ask(Asked(digest, tenant, tokens, rank=rank)))

        self.world.every(2 * STEP_S, refill, first=self.world.now)

    def leave(self, tenant: str) -> None:
        """What waits runs still."""
        self.there[tenant] = 0

    def run(self, seconds: float) -> dict[str, int]:
        """What was spent for each tenant meanwhile."""
        before = self.scheduler.spent.copy()
        self.world.run(self.world.now + seconds)
        self.scheduler.check()
        return {name: spent - before[name] for name, spent in self.scheduler.spent.items()}


@pytest.mark.parametrize("weight", [0.02, 50.0])
def test_who_alone_can_run_somewhere_is_no_measure_of_those_who_come(weight: float) -> None:
    """Whether its counter is far above those of others or far below."""
    house = House(weights={"special": weight})
    house.come("special", "large", rank=64)
    house.come("steady", "v")
    house.run(20.0)
    for number in range(4):
        new = f"new{number}"
        house.come(new, "w")
        spent = house.run(2.0)
        assert 0.7 <= spent[new] / spent["steady"] <= 1.4
        house.leave(new)
        house.run(1.01)


def test_a_long_wait_for_a_slot_is_credit_of_nobody() -> None:
    """Neither of those who come when it is over, nor of who has waited."""
    house = House(slots=1, aging_s=20.0)
    house.come("special", "large", rank=64)
    house.come("steady", "v")
    house.run(1.0)
    house.come("cold", "w", at_once=2)
    assert "cold" not in house.run(20.0)
    assert house.run(2.0)["cold"]
    house.come("new", "v")
    spent = house.run(30.0)
    assert 0.7 <= spent["new"] / spent["steady"] <= 1.4


def test_who_comes_during_a_long_wait_has_neither_debt_nor_credit() -> None:
    house = House(slots=2, aging_s=1000.0)
    house.come("special", "large", rank=64)
    house.come("steady", "v")
    house.come("other", "u")
    house.run(1.0)
    house.come("cold", "w")
    house.run(20.0)
    house.come("new", "v")
    spent = house.run(4.0)
    assert 0.7 <= spent["new"] / spent["steady"] <= 1.4
    house.leave("other")
    house.run(2.0)  # The slot that it leaves is for the cold one.
    house.come("newer", "v")
    spent = house.run(6.0)
    shares = [spent[name] for name in ("steady", "new", "newer", "cold")]
    assert min(shares) / max(shares) >= 0.6


Comer = Callable[[House, int], None]


def special(house: House, number: int) -> None:
    house.come(f"special{number}", "large", rank=64)


def cold(house: House, number: int) -> None:
    house.come(f"cold{number}", f"cold{number}", at_once=1)


def light(house: House, number: int) -> None:
    house.come(f"light{number}", "v", at_once=1)


def heavy(house: House, number: int) -> None:
    house.come(f"heavy{number}", "", at_once=4 * SEATS)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    comers=st.lists(st.sampled_from([special, cold, light, heavy]), min_size=1, max_size=6),
    weight=st.sampled_from([1.0, 3.0]),
    rejects=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_who_can_always_run_gets_its_share_whoever_else_comes_and_goes(
    comers: list[Comer], weight: float, rejects: int, seed: int
) -> None:
    house, rng = House(slots=3, weights={"two": weight, "special0": 0.05}), Random(seed)
    house.come("one", "v")
    house.come("two", "v")
    house.run(1.0)
    begun = house.scheduler.spent.copy()
    for number, comer in enumerate(comers):
        comer(house, number)
        house.scheduler.executors["a:1"].rejects["v"] = rejects
        house.run(rng.random() * 3.0)
        for tenant in rng.sample(sorted(house.there.keys() - {"one", "two"}), 1):
            house.leave(tenant)
        spent = house.scheduler.spent - begun
        assert abs(spent["one"] - spent["two"] / weight) <= BOUND


def test_who_is_blocked_is_looked_at_once() -> None:
    """However many come meanwhile."""
    looks = 0

    def can_progress(name: str) -> bool:
        nonlocal looks
        looks += 1
        return not name.startswith("blocked")

    shares = Shares(can_progress)
    for number in range(100):
        shares.enter(f"blocked{number}")
    for number in range(1000):
        shares.enter(f"t{number}")
    assert looks <= 1200


def test_the_base_model_is_forgotten_like_any_version_when_nobody_waits_for_it() -> None:
    """Its digest is empty, and so was the name that stood for nobody."""
    shares = Shares(lambda name: False)
    shares.enter("")
    shares.charge("", 10)
    assert shares.of("other") == 0.0
