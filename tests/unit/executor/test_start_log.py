"""The log of a start says which part lasts, how far it is, and what is left."""

import threading

import pytest

from executor.start_log import start_part
from tests.support.services.cluster import wait_until


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")


def said(caplog: pytest.LogCaptureFixture, words: str) -> bool:
    return any(words in message for message in caplog.messages)


def test_a_part_that_lasts_says_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with start_part("compiling", 3, ("attention", "sampler", "rest"), every_s=0.001) as part:
        assert caplog.messages[0] == "start: compiling (3)"
        wait_until(lambda: said(caplog, "0 of 3 done, not yet: attention, sampler, rest"), "it is told")
        threading.Thread(target=part.advance, args=("sampler",)).start()
        wait_until(lambda: said(caplog, "1 of 3 done, not yet: attention, rest"), "it is told")
        for name in ("attention", "rest"):
            part.advance(name)
        wait_until(lambda: caplog.messages[-1].endswith("s, 3 of 3 done"), "it is told")
    assert caplog.messages[-1].startswith("start: compiling took ")


def test_a_part_of_unknown_length_says_what_it_did(caplog: pytest.LogCaptureFixture) -> None:
    with start_part("largest steps", every_s=0.001) as part:
        wait_until(lambda: caplog.messages[-1].startswith("start: largest steps lasts for "), "it is told")
        assert "done" not in caplog.messages[-1]
        part.advance()
        wait_until(lambda: caplog.messages[-1].endswith("s, 1 done"), "it is told")


def test_a_part_that_fails_did_not_take_any_time(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OSError, match="gone"), start_part("loading"):
        raise OSError("gone")
    assert caplog.messages == ["start: loading"]
    assert "start-log" not in {thread.name for thread in threading.enumerate()}
