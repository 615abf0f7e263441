import subprocess
import sys
from collections import Counter
from random import Random

import pytest

from scheduler.dispatch.placement.rendezvous import Rendezvous

DIGESTS = [f"sha256:{number}" for number in range(10_000)]


def firsts(names: list[str], weights: list[float] | None = None, digests: list[str] = DIGESTS) -> list[str]:
    rendezvous = Rendezvous(names, weights or [16.0] * len(names))
    return [names[rendezvous.order(digest, 1)[0]] for digest in digests]


@pytest.mark.parametrize("executors", [4, 8, 32])
def test_a_join_or_a_leave_moves_a_share_of_the_versions(executors: int) -> None:
    """Each moves only to who joined, or away from who left: by the worst of two fleets."""
    for seed in range(2):
        names = [f"pod-{Random(seed).randrange(1 << 32):x}-{number}" for number in range(executors)]
        before, after = firsts(names), firsts([*names[:-1], names[-1], "another"])
        moved = [there for here, there in zip(before, after, strict=True) if here != there]
        assert set(moved) == {"another"}
        assert len(moved) <= 1.2 / executors * len(DIGESTS)
        left = firsts(names[1:])
        moved = [here for here, there in zip(before, left, strict=True) if here != there]
        assert set(moved) == {names[0]}
        assert len(moved) <= 1.2 / executors * len(DIGESTS)


def test_an_executor_is_first_by_its_weight() -> None:
    weights = [8.0, 16.0, 16.0, 40.0]
    found = Counter(firsts(list("abcd"), weights))
    for name, weight in zip("abcd", weights, strict=True):
        assert found[name] == pytest.approx(len(DIGESTS) * weight / sum(weights), rel=0.1)


def test_what_another_weighs_changes_nothing_between_two() -> None:
    names = list("abc")
    one, other = Rendezvous(names, [16.0, 16.0, 16.0]), Rendezvous(names, [16.0, 16.0, 64.0])
    for digest in DIGESTS[:200]:
        orders = [[at for at in each.order(digest) if at < 2] for each in (one, other)]
        assert orders[0] == orders[1]


def test_the_order_of_names_changes_nothing() -> None:
    names = [f"pod-{number}" for number in range(9)]
    assert firsts(names, digests=DIGESTS[:200]) == firsts(names[::-1], digests=DIGESTS[:200])


@pytest.mark.parametrize("weights", [[1.0] * 40, [1.0 + at % 3 for at in range(40)]])
def test_the_first_ones_are_those_of_the_whole_order(weights: list[float]) -> None:
    rendezvous = Rendezvous([f"pod-{at}" for at in range(40)], weights)
    for digest in DIGESTS[:50]:
        whole = rendezvous.order(digest)
        assert sorted(whole) == list(range(40))
        assert [rendezvous.order(digest, count) for count in (1, 16, 40)] == [whole[:1], whole[:16], whole]


def test_all_processes_have_the_same_order() -> None:
    code = (
        "from scheduler.dispatch.placement.rendezvous import Rendezvous; "
        "print(Rendezvous(list('abcdefgh'), [1.0] * 8).order('sha256:7'))"
    )
    told = []
    for seed in "12":
        run = subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True)
        told.append(run.stdout.decode().strip())
    assert told == [str(Rendezvous(list("abcdefgh"), [1.0] * 8).order("sha256:7"))] * 2
