"""Splitting traffic: every key in its place, and no more of them move than the weights say."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from adapter_store.split import choose

KEYS = [f"session-{number}" for number in range(600)]
digests = st.integers(0, 10**9).map(lambda number: f"sha256:{number:064x}")
weighings = st.dictionaries(digests, st.integers(1, 100), min_size=2, max_size=5)


def placed(alias: str, weights: dict[str, int]) -> dict[str, str]:
    return {key: choose(alias, weights, key) for key in KEYS}


@given(weighings, st.data())
def test_a_raised_weight_only_draws_and_a_lowered_one_only_gives(
    weights: dict[str, int], data: st.DataObject
) -> None:
    digest = data.draw(st.sampled_from(sorted(weights)))
    weight = data.draw(st.integers(1, 100))
    before, after = placed("a/x@p", weights), placed("a/x@p", {**weights, digest: weight})
    for key in KEYS:
        if before[key] != after[key]:
            assert (after if weight > weights[digest] else before)[key] == digest


@given(weighings, st.data())
def test_a_new_target_only_draws_and_one_that_goes_only_gives(
    weights: dict[str, int], data: st.DataObject
) -> None:
    digest = data.draw(st.sampled_from(sorted(weights)))
    rest = {other: weight for other, weight in weights.items() if other != digest}
    before, after = placed("a/x@p", weights), placed("a/x@p", rest)
    assert all(after[key] == before[key] for key in KEYS if before[key] != digest)


@given(weighings, st.integers(2, 9))
def test_only_the_ratio_of_weights_counts(weights: dict[str, int], factor: int) -> None:
    assert placed("a/x@p", weights) == placed("a/x@p", {d: w * factor for d, w in weights.items()})


@given(st.integers(1, 99), st.integers(1, 99))
def test_between_two_versions_just_the_difference_moves(first: int, second: int) -> None:
    """Of 2,000 keys |first - second| percent move, give or take five standard deviations."""
    a, b = (f"sha256:{number:064x}" for number in (1, 2))
    moved = sum(
        choose("a/x@p", {a: first, b: 100 - first}, str(key))
        != choose("a/x@p", {a: second, b: 100 - second}, str(key))
        for key in range(2000)
    )
    share = abs(first - second) / 100
    assert abs(moved / 2000 - share) <= 5 * (share * (1 - share) / 2000) ** 0.5 + 1e-9


def test_shares_are_what_the_weights_say() -> None:
    weights = {f"sha256:{number:064x}": weight for number, weight in enumerate((90, 9, 1))}
    counts = Counter(choose("acme/x@prod", weights, str(key)) for key in range(20_000))
    for digest, weight in weights.items():
        share = weight / 100
        assert abs(counts[digest] / 20_000 - share) < 5 * (share * (1 - share) / 20_000) ** 0.5


def test_aliases_split_independently_and_answers_never_change() -> None:
    weights = {f"sha256:{number:064x}": 1 for number in range(2)}
    first, second = placed("a/x@p", weights), placed("a/y@p", weights)
    assert 0.3 < sum(first[key] == second[key] for key in KEYS) / len(KEYS) < 0.7
    # Schedulers of different versions must agree: this is what the function says for ever.
    assert [choose("a/x@p", weights, key)[-1] for key in KEYS[:12]] == list("011111000010")
