"""Counts of what tenants hold at once of something that all share."""

import pytest

from scheduler.errors import TooMuchHeld
from scheduler.tenants.held import Held


def test_a_tenant_and_all_hold_so_much_and_what_is_given_back_is_there_for_others() -> None:
    held = Held("TOO_MANY_THINGS", "things", 4, lambda tenant: 3)
    held.take("a", 3)
    with pytest.raises(TooMuchHeld, match="tenant a has too many things: at most 3 at once"):
        held.take("a", 1)
    held.take("b", 1)
    with pytest.raises(TooMuchHeld, match="there are too many things now"):
        held.take("c", 1)
    held.give_back("a", 2)
    held.take("c", 2)
    assert (held["a"], held["b"], held["c"], held.total) == (1, 1, 2, 4)


@pytest.mark.parametrize(("lasted_s", "told_s"), [(0.0, 0.1), (2.0, 2.0), (1000.0, 60.0)])
def test_who_is_refused_is_told_how_long_the_others_have_lasted(lasted_s: float, told_s: float) -> None:
    now = [0.0]
    held = Held("TOO_MANY_THINGS", "things", 1, lambda tenant: 1, lambda: now[0])
    for _ in range(50):
        with held.one("a"):
            now[0] += lasted_s
    with held.one("a"), pytest.raises(TooMuchHeld) as caught:
        held.take("b", 1)
    assert caught.value.reason == "TOO_MANY_THINGS"
    assert caught.value.retry_after_s == pytest.approx(told_s, rel=0.01)
