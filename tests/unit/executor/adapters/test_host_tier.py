"""The host tier: what stays in its bound, and what leaves for something else."""

import random

from executor.adapters.host_tier import HostTier
from tests.support.engines.pager_world import Block


def holding(max_bytes: int, *digests: str) -> HostTier[Block]:
    tier: HostTier[Block] = HostTier(max_bytes, 10)
    for digest in digests:
        assert tier.put(digest, Block(10), ())
    return tier


def test_it_refuses_what_does_not_fit_beside_what_is_kept() -> None:
    tier = holding(20, "a", "b")
    assert not tier.put("c", Block(20), {"a"})
    assert sorted(tier) == ["a", "b"]
    tier.check()


def test_the_least_used_leaves_first_and_the_least_recently_used_among_equals() -> None:
    tier = holding(30, "a", "b", "c")
    for digest in "aabbc":  # the first page-in of each is what it came for
        tier.use(digest)
    assert tier.put("d", Block(10), ())
    assert sorted(tier) == ["a", "b", "d"]
    for digest in "dda":
        tier.use(digest)
    assert tier.put("e", Block(10), ())
    assert sorted(tier) == ["a", "d", "e"]
    tier.check()


def test_uses_before_it_came_back_count() -> None:
    tier = holding(20, "a")
    for digest in "aaa":
        tier.use(digest)
    tier.discard("a")
    for digest in "bac":
        assert tier.put(digest, Block(10), ())
    assert sorted(tier) == ["a", "c"]


def test_of_equally_used_images_the_larger_leaves() -> None:
    tier = holding(40)
    for digest, size in (("small", 10), ("large", 30)):
        assert tier.put(digest, Block(size), ())
    assert tier.put("new", Block(10), ())
    assert sorted(tier) == ["new", "small"]


def test_zipf_over_three_sizes_takes_fewer_loads_than_by_recency() -> None:
    numbers = range(1000)
    weights = [1 / (number + 1) for number in numbers]
    draw = random.Random(1)
    size_of = draw.choices((1, 2, 4), (6, 3, 1), k=1000)
    uses = draw.choices(numbers, weights, k=6000)
    tier: HostTier[Block] = HostTier(128, 4)
    recent: dict[int, None] = {}
    loads, by_recency, held = 0, 0, 0
    for number in uses:
        if str(number) not in tier:
            assert tier.put(str(number), Block(size_of[number]), ())
            loads += 1
        tier.use(str(number))
        if number not in recent:
            by_recency, held = by_recency + 1, held + size_of[number]
        recent.pop(number, None)
        recent[number] = None
        while held > 128:
            oldest = next(iter(recent))
            del recent[oldest]
            held -= size_of[oldest]
    tier.check()
    assert loads <= 0.8 * by_recency, (loads, by_recency)
