from hypothesis import given
from hypothesis import strategies as st

from executor.adapters.cold_waits import MAX_OF_A_STREAM, MAX_TOLD, ColdWait, ColdWaits

CHANGES = st.tuples(st.sampled_from(("begin", "end", "close")), st.integers(1, 3), st.integers(0, 4))


@given(st.lists(CHANGES, max_size=40))
def test_the_line_is_what_streams_said_and_have_not_ended(changes: list[tuple[str, int, int]]) -> None:
    """Against plain books; a wait that is told again keeps its beginning."""
    cold, books = ColdWaits(), dict[tuple[int, str], float]()
    for now, (what, stream, number) in enumerate(changes):
        digest = f"d{number}"
        if what == "begin":
            cold.begin(stream, digest, float(now))
            books.setdefault((stream, digest), float(now))
        elif what == "end":
            assert cold.end(stream, digest) == ((stream, digest) in books)
            books.pop((stream, digest), None)
        else:
            cold.close(stream)
            books = {key: since for key, since in books.items() if key[0] != stream}
        waits = [(min(s for (_, d), s in books.items() if d == name), name) for _, name in books]
        assert cold.line() == tuple(ColdWait(name, since) for since, name in sorted(set(waits)))


def test_a_wait_that_is_not_told_again_in_time_is_over() -> None:
    """Its beginning stands, however often it is told again."""
    cold = ColdWaits()
    assert cold.begin(1, "told-again", 3.0, until=13.0) and cold.begin(1, "stopped", 2.0, until=13.0)
    assert cold.begin(2, "never-again", 1.0)
    assert not cold.begin(1, "told-again", 4.0, until=16.0)
    cold.lapse(13.0)
    assert cold.line() == (ColdWait("never-again", 1.0), ColdWait("told-again", 3.0))
    cold.lapse(16.0)
    assert cold.line() == (ColdWait("never-again", 1.0),)
    assert cold.begin(1, "told-again", 5.0, until=20.0) and not cold.end(1, "stopped")


def test_who_waits_longest_stays_of_too_many() -> None:
    cold = ColdWaits()
    for number in range(2 * MAX_OF_A_STREAM):
        cold.begin(1, f"{number:04}", float(number))
    assert [wait.digest for wait in cold.line()] == [f"{number:04}" for number in range(MAX_TOLD)]
    assert not cold.end(1, f"{MAX_OF_A_STREAM:04}") and cold.end(1, f"{MAX_OF_A_STREAM - 1:04}")
