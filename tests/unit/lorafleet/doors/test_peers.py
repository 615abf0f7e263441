"""Calls a second by address, on a clock that the test moves."""

from heapq import heappop, heappush
from random import Random

import pytest

from lorafleet.doors.peers import BURST_S, MAX_PEERS, MAX_TOLD, PeerRates, host
from lorafleet.doors.refusals import TooManyCalls


def takes(rates: PeerRates, address: str, calls: int) -> int:
    """How many of so many calls are let through."""
    through = 0
    for _ in range(calls):
        try:
            rates.take(address)
            through += 1
        except TooManyCalls:
            pass
    return through


def test_an_address_has_a_bucket_of_its_own_that_fills_again() -> None:
    now = 0.0
    rates = PeerRates(10, clock=lambda: now)
    assert takes(rates, "a", 50) == 20
    assert takes(rates, "b", 50) == 20
    now = 0.55
    assert takes(rates, "a", 50) == 5
    now = 1000.0
    assert takes(rates, "a", 50) == 20


def test_no_number_of_addresses_takes_more_memory() -> None:
    rates = PeerRates(1, clock=lambda: 0.0)
    for number in range(3 * MAX_PEERS):
        rates.take(str(number))
    assert len(rates) == MAX_PEERS


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(("times", "seconds"), [(1.5, 10.0), (2.5, 4.0)])
def test_one_retry_after_the_told_delay_is_let_through(times: float, seconds: float, named: bool) -> None:
    """Without a name whoever comes first takes the place: so those that were told are on time there."""
    rate, rng = 10.0, Random(str(times))
    calls = [
        (rng.uniform(0, seconds), f"call {number}", False) for number in range(int(times * rate * seconds))
    ]
    now, retried, came_in, through = 0.0, 0, 0, 0
    rates = PeerRates(rate, clock=lambda: now)
    calls.sort()
    while calls:
        now, key, again = heappop(calls)
        try:
            rates.take("a", key if named else "")
        except TooManyCalls as refused:
            retried += again
            if not again:
                late_s = rng.uniform(0, 0.1) if named else 0.0
                heappush(calls, (now + refused.retry_after_s + late_s, key, True))
        else:
            retried, came_in, through = retried + again, came_in + again, through + 1
    assert retried > 30 and came_in >= 0.95 * retried
    assert through <= rate * (now + BURST_S) + MAX_TOLD


@pytest.mark.parametrize("rate", [1.0, 10.0])
@pytest.mark.parametrize("comes_back", [0.0, 0.2])
def test_those_who_do_not_come_again_leave_the_rate_to_others(rate: float, comes_back: float) -> None:
    """Each call has a name of its own, as our clients' have."""
    now, rng, through, calls = 0.0, Random(1), 0, [(n / (5 * rate), f"call {n}", False) for n in range(1500)]
    rates = PeerRates(rate, clock=lambda: now)
    while calls:
        now, key, again = heappop(calls)
        try:
            rates.take("a", key)
            through += 1
        except TooManyCalls as refused:
            if not again and rng.random() < comes_back:
                heappush(calls, (now + refused.retry_after_s, key, True))
    assert 0.8 * rate * now <= through <= rate * (now + BURST_S) + MAX_TOLD


@pytest.mark.parametrize(
    ("peer", "address"),
    [("ipv4:10.0.0.7:51234", "10.0.0.7"), ("ipv6:%5B::1%5D:51234", "::1"), ("ipv6:[fe80::2]:5", "fe80::2"),
     ("unix:/run/socket", "unix:/run/socket")],
)  # fmt: skip
def test_the_address_of_a_peer_is_told_without_its_port(peer: str, address: str) -> None:
    assert host(peer) == address
