from random import Random

import pytest

from scheduler.dispatch.placement.homes import Homes, HomesSettings, Member
from scheduler.fleet.levels import bits

EIGHT = [Member(f"pod-{number}", 64, 16) for number in range(8)]
ALL = (1 << 8) - 1


def homes_of(members: list[Member] = EIGHT, **settings: float) -> Homes:
    homes = Homes(HomesSettings(**settings))  # type: ignore[arg-type]
    homes.follow(members)
    return homes


def come(
    homes: Homes, digest: str, requests: int, now: float = 0.0, rank: int = 8, serving: int = ALL
) -> int:
    """So many requests at one moment, each placed at a home. Where the version is at home then."""
    for _ in range(requests):
        homes.placed(digest, homes.of(digest, rank, serving, now), now)
    homes.check()
    return homes.of(digest, rank, serving, now)


def zipf(versions: int, requests: int, rng: Random) -> list[str]:
    weights = [1 / (number + 1) for number in range(versions)]
    return [f"v{number}" for number in rng.choices(range(versions), weights, k=requests)]


def test_a_version_with_little_traffic_has_one_home() -> None:
    homes = homes_of()
    for number in range(50):
        assert come(homes, f"v{number}", 1).bit_count() == 1


def test_homes_grow_at_once_and_shrink_slowly() -> None:
    homes = homes_of()
    one = come(homes, "hot", 1)
    many = come(homes, "hot", 400)
    assert many == ALL
    for number in range(40):
        come(homes, f"other{number}", 100)
    few = come(homes, "hot", 0, now=2.0)
    assert few.bit_count() == 7  # One a look, however little is left.
    now = 2.0
    while few.bit_count() > 1:
        now += 2.0
        few = come(homes, "hot", 0, now)
    assert now > 10.0 and few == one


def test_a_version_may_have_more_homes_than_are_kept_in_order() -> None:
    members = [Member(f"pod-{number}", 64, 16) for number in range(50)]
    homes, everyone = homes_of(members), (1 << 50) - 1
    assert come(homes, "hot", 900, serving=everyone).bit_count() > 30
    last = homes.of("cold", 8, everyone, 0.0)
    few = 1 << 49 | 1 << 7
    assert homes.of("cold", 8, few, 0.0) & few and last.bit_count() == 1
    homes.check()


def test_heat_fades() -> None:
    """As many requests, but over a long time: they are no burst."""
    homes = homes_of()
    for second in range(400):
        assert come(homes, "slow", 1, now=2.0 * second).bit_count() == 1


def test_the_first_homes_stay_when_there_are_more_of_them() -> None:
    homes = homes_of()
    before = come(homes, "hot", 1)
    for _ in range(30):
        after = come(homes, "hot", 10)
        assert before & after == before
        before = after
    assert before == ALL


def test_what_comes_where_no_home_is_counts_twice() -> None:
    inside, outside = homes_of(), homes_of()
    for _ in range(30):
        inside.placed("hot", inside.of("hot", 8, ALL, 0.0), 0.0)
        outside.placed("hot", ALL & ~outside.of("hot", 8, ALL, 0.0), 0.0)
    assert outside.of("hot", 8, ALL, 0.0).bit_count() > inside.of("hot", 8, ALL, 0.0).bit_count()


def test_a_large_version_needs_more_traffic_for_a_second_home() -> None:
    assert come(homes_of(), "hot", 30, rank=8).bit_count() == 2
    assert come(homes_of(), "hot", 30, rank=64).bit_count() == 1


def test_homes_are_among_those_that_serve() -> None:
    homes = homes_of()
    [home] = bits(come(homes, "v", 1))
    elsewhere = come(homes, "v", 1, serving=ALL & ~(1 << home))
    assert elsewhere and not elsewhere >> home & 1
    assert come(homes, "v", 1) == 1 << home
    assert homes.of("v", 8, 0, 0.0) == 0


@pytest.mark.parametrize("seed", range(5))
def test_no_executor_is_home_to_more_than_its_share(seed: int) -> None:
    """By Zipf 1.0 over 200 versions: of traffic by seats, of versions by slots."""
    sizes = [1 + number % 2 for number in range(8)]
    members = [Member(f"{seed}-pod-{at}", 64 * size, 16 * size) for at, size in enumerate(sizes)]
    homes, rng = homes_of(members), Random(seed)
    for step in range(60):
        requests = [f"v{number}" for number in range(200) for _ in range(round(20 / (number + 1)) or 1)]
        rng.shuffle(requests)
        for digest in requests:
            come_once(homes, digest, step / 2)
    loads, counts = [0.0] * 8, [0] * 8
    for number in range(200):
        mask = homes.of(f"v{number}", 8, ALL, 30.0)
        for position in bits(mask):
            part = members[position].seats / sum(members[home].seats for home in bits(mask))
            loads[position] += part * (round(20 / (number + 1)) or 1)
            counts[position] += 1
    for load, count, size in zip(loads, counts, sizes, strict=True):
        assert load <= 1.3 * sum(loads) * size / sum(sizes)
        assert count <= 1.3 * sum(counts) * size / sum(sizes)


def come_once(homes: Homes, digest: str, now: float, serving: int = ALL) -> None:
    homes.placed(digest, homes.of(digest, 8, serving, now), now)


def test_schedulers_that_see_like_traffic_have_like_homes() -> None:
    """Each sees other requests of the same traffic."""
    seen = []
    for seed in range(2):
        homes, rng = homes_of(), Random(seed)
        for step in range(40):
            for digest in zipf(200, 100, rng):
                come_once(homes, digest, step / 2)
        seen.append([homes.of(f"v{number}", 8, ALL, 20.0) for number in range(200)])
    shared = sum(bool(here & there) for here, there in zip(*seen, strict=True))
    assert shared >= 160


@pytest.mark.parametrize("seed", range(5))
def test_a_join_or_a_leave_moves_a_share_of_versions_with_traffic(seed: int) -> None:
    """Each has had a request, and has another one then."""
    fleet = [Member(f"{seed}-pod-{number}", 64, 16) for number in range(16)]
    homes, digests = homes_of(fleet), [f"v{number}" for number in range(5000)]

    def look(serving: int, now: float) -> list[int]:
        for digest in digests:
            come_once(homes, digest, now, serving)
        homes.check()
        return [homes.of(digest, 8, serving, now) for digest in digests]

    def moved(before: list[int], after: list[int]) -> float:
        return sum(here != there for here, there in zip(before, after, strict=True)) / len(digests)

    everyone = (1 << 16) - 1
    before = look(everyone, 0.0)
    homes.follow([*fleet, Member(f"{seed}-another", 64, 16)])
    joined = look((1 << 17) - 1, 10.0)
    assert moved(before, joined) <= 1.2 / 16
    homes.follow(fleet)
    assert moved(joined, look(everyone, 20.0)) <= 1.2 / 16


def test_what_is_remembered_is_bounded_and_stays_right() -> None:
    homes = homes_of(max_versions=64)
    for step in range(2000):
        come(homes, f"v{step % 150}", 1, now=step * 0.7)  # Heat is kept as of several moments, one by one.
    homes.check()


def test_versions_without_requests_leave_the_balance() -> None:
    homes = homes_of()
    for number in range(300):
        come(homes, f"old{number}", 1)
    for number in range(20):
        come(homes, f"new{number}", 1, now=100.0)
    assert homes.num_versions <= 20
