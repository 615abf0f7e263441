from scheduler.dispatch.cold import LASTS_S
from scheduler.dispatch.planning import Hint, Planning, Wait
from scheduler.dispatch.policy import Policy
from scheduler.dispatch.queue import Queue
from scheduler.fleet.index import FleetIndex
from scheduler.fleet.state import ExecutorState
from tests.support.services.planning import executor, request

AGING_S = 1.0


def planning(*states: ExecutorState) -> Planning:
    queue = Queue(100, 100)
    return Planning(queue, Policy(queue, FleetIndex(states), AGING_S))


def hints(core: Planning) -> list[Hint]:
    found = []
    while core.may_hint:
        if hint := core.hint():
            found.append(hint)
    return found


def full() -> ExecutorState:
    state = executor("a:1", seats=1, slots=1)
    state.sent("other", "y")
    return state


def test_a_version_is_hinted_once_when_its_first_request_waits() -> None:
    core = planning(full())
    core.arrive(request(1, "x"))
    core.arrive(request(2, "x"))
    assert core.next(0.0) is None
    assert hints(core) == [Hint("a:1", "x", AGING_S, 2)]
    core.arrive(request(3, "x"))
    assert hints(core) == []


def test_nothing_is_hinted_of_what_was_sent_or_asks_for_the_base_model() -> None:
    state = executor("a:1", seats=1)
    core = planning(state)
    core.arrive(request(1, "x"))
    core.arrive(request(2))
    placement = core.next(0.0)
    assert placement is not None
    assert core.take(placement).digest == "x"
    state.sent("1", "x")
    assert hints(core) == []


def test_who_waits_for_a_slot_is_told_with_its_number_of_requests() -> None:
    core = planning(full())
    for number in (1, 2):
        core.arrive(request(number, "x"))
    assert core.next(0.0) is None and core.tend(0.5 * AGING_S) == []
    assert core.tend(AGING_S) == [Wait("a:1", "x", 2, AGING_S, LASTS_S)]
