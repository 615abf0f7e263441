from executor.adapters.backoff import FIRST_PAUSE_S, MAX_PAUSE_S, Backoffs
from executor.rejection import draining

AWAY = draining()


def test_the_pause_doubles_up_to_its_bound_however_long_it_lasts() -> None:
    backoffs, now, pauses = Backoffs(), 0.0, []
    for _ in range(2000):
        backoffs.failed("a", AWAY, now)
        assert backoffs.rejection("a", now) == AWAY
        length = next(s for s in (0.5, 1, 2, 4, 8, 15) if backoffs.rejection("a", now + s) is None)
        pauses.append(length)
        now += length
    assert pauses[:7] == [FIRST_PAUSE_S, 1, 2, 4, 8, MAX_PAUSE_S, MAX_PAUSE_S]
    assert pauses[-1] == MAX_PAUSE_S


def test_a_success_or_a_long_silence_forgets() -> None:
    backoffs = Backoffs()
    backoffs.failed("a", AWAY, 0.0)
    backoffs.clear("a")
    assert backoffs.rejection("a", 0.0) is None
    backoffs.failed("a", AWAY, 0.0)
    backoffs.failed("b", AWAY, 100.0)
    backoffs.failed("a", AWAY, 100.0)
    assert backoffs.rejection("a", 100.0 + FIRST_PAUSE_S) is None
