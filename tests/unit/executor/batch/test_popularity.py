from math import inf

import pytest

from executor.batch.popularity import Popularity


def count(popularity: Popularity, digest: str, beside: str) -> float:
    """As a multiple of the other's."""
    return 2.0 ** (popularity.of(digest) - popularity.of(beside))


def test_counts_of_uses_close_together_are_counts() -> None:
    popularity = Popularity(half_life=1e9, max_versions=8)
    for digest in "aabaab":
        popularity.use(digest)
    assert count(popularity, "a", "b") == pytest.approx(2.0)
    assert popularity.of("c") == -inf


def test_a_use_counts_half_after_a_half_life() -> None:
    popularity = Popularity(half_life=10, max_versions=8)
    popularity.use("a")
    for _ in range(9):
        popularity.use("x")
    popularity.use("b")
    assert count(popularity, "b", "a") == pytest.approx(2.0)


def test_it_stays_exact_after_many_uses() -> None:
    popularity = Popularity(half_life=16, max_versions=8)
    for _ in range(100_000):
        popularity.use("x")
    for digest in "aab":
        popularity.use(digest)
    assert count(popularity, "a", "b") == pytest.approx(2 ** (-1 / 16) + 2 ** (-2 / 16))
    assert count(popularity, "x", "b") == pytest.approx(2 ** (-3 / 16) / (1 - 2 ** (-1 / 16)))


def test_of_too_many_the_least_recently_used_is_forgotten() -> None:
    popularity = Popularity(half_life=16, max_versions=3)
    for digest in "aaabcad":
        popularity.use(digest)
    assert len(popularity) == 3
    assert popularity.of("b") == -inf and popularity.of("a") > popularity.of("d")
