"""Lanes: when requests are sent, how many at once, what ends them, and what is known after an interrupt."""

import asyncio
import time
from collections.abc import Callable

import pytest

from lorafleet.bench.errors import BenchError, EngineEnded
from lorafleet.bench.play import play
from lorafleet.bench.requests import Lane, Record, Recording, Request
from lorafleet.bench.session import Session
from lorafleet.bench.workload import Names


class StandIn:
    """Answers with one piece a turn; what it does can be replaced."""

    def __init__(self) -> None:
        self.at_once = 0
        self.most_at_once = 0
        self.before: Callable[[Request], None] = lambda request: None
        self.answers = True

    async def ask(self, request: Request, record: Record) -> None:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            self.before(request)
            for _ in range(request.max_new_tokens):
                await asyncio.sleep(0)
                if self.answers:
                    record.pieces.append((time.monotonic(), 1))
            while not self.answers:
                await asyncio.sleep(1)
            if request.adapter == "unknown":
                record.error = "ADAPTER_NOT_FOUND"
        finally:
            self.at_once -= 1

    async def flush(self) -> None:
        """Nothing is held back."""

    async def metrics(self) -> list[str]:
        return ["lorafleet_executor_slots 4.0"]


def requests(count: int, at: float = 0.0, adapter: str | None = None) -> list[Request]:
    return [Request(at * number, (1, 2), 3, adapter) for number in range(count)]


async def test_all_requests_of_all_lanes_are_played_in_order() -> None:
    recording, caller = Recording(), StandIn()
    await play([Lane("a", requests(3, at=0.01)), Lane("b", requests(2))], caller, recording)
    assert [record.output_tokens for record in recording.records] == [3] * 5
    assert all(record.whole and record.sent >= record.due for record in recording.records)
    assert [len(recording.lane(name).records) for name in "ab"] == [3, 2]
    assert recording.ended is not None and recording.ended - recording.started >= 0.02


async def test_concurrency_is_bounded_within_a_lane() -> None:
    caller = StandIn()
    await play([Lane("a", requests(9), max_concurrency=2)], caller, Recording())
    assert caller.most_at_once == 2


@pytest.mark.parametrize("one_by_one", [True, False])
async def test_a_caller_says_whether_a_burst_goes_out_at_once(one_by_one: bool) -> None:
    """A call to a scheduler is sent a turn after it was made; an engine alone gets all in one batch."""
    turns: list[str] = []

    class Sender(StandIn):
        async def ask(self, request: Request, record: Record) -> None:
            turns.append("made")
            await asyncio.sleep(0)
            turns.append("sent")

        async def flush(self) -> None:
            if one_by_one:
                await asyncio.sleep(0)

    await play([Lane("a", requests(9))], Sender(), Recording())
    ahead = [turns[: end + 1].count("made") - turns[: end + 1].count("sent") for end in range(len(turns))]
    assert turns.count("sent") == 9
    assert max(ahead) <= 2 if one_by_one else max(ahead) == 9


async def test_a_background_lane_ends_with_the_others_and_is_no_failure() -> None:
    recording = Recording()
    await play(
        [Lane("a", requests(1)), Lane("b", requests(9, at=30.0), background=True)], StandIn(), recording
    )
    behind = recording.lane("b").records
    assert len(behind) == 1, "the others were never due"
    assert not behind[0].error


async def test_the_end_of_what_is_measured_ends_the_play() -> None:
    caller = StandIn()

    def end(request: Request) -> None:
        raise EngineEnded("the engine has ended: out of memory")

    caller.before = end
    with pytest.raises(EngineEnded, match="out of memory"):
        await play([Lane("a", requests(3))], caller, Recording())


async def test_what_was_seen_before_an_interrupt_stays() -> None:
    recording, caller = Recording(), StandIn()
    caller.answers = False
    playing = asyncio.create_task(play([Lane("a", requests(2))], caller, recording))
    while caller.at_once < 2:
        await asyncio.sleep(0)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert [(record.cut, record.whole) for record in recording.records] == [(True, False)] * 2


async def test_adapters_that_cannot_be_used_stop_a_session_with_advice() -> None:
    notes: list[str] = []
    session = Session(StandIn(), Names(100), 0, notes.append)
    played = await session.load(["a", "b"])
    assert played.slots and played.slots.slots == 4
    with pytest.raises(BenchError, match=r"unknown cannot be used: ADAPTER_NOT_FOUND; .*make-adapters"):
        await session.load(["a", "unknown"])
