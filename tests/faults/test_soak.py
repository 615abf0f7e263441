"""A few seconds of everything: no error is the fleet's own, nothing is kept. `make soak` takes longer."""

import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from lorafleet import AdapterNotFound, Unavailable
from tests.support.adapters.peft import make_base
from tests.support.adapters.tokenizers import CHAT_TEMPLATE, byte_level, write_folder
from tests.support.services.cluster import Cluster
from tests.support.soak.causes import Cause, Causes
from tests.support.soak.fleet import Fleet, Size
from tests.support.soak.run import faults, soak
from tests.support.soak.verdict import flatness
from tests.support.soak.watch import Sample

SIZE = Size(
    schedulers=1,
    executors=1,
    tenants=2,
    adapters=2,
    guests=4,
    warm_s=0.5,
    guest_pause_s=0.1,
    operator_pause_s=0.1,
    breaker_pause_s=0.5,
    deaf_s=0.0,
    delete_grace_s=0.0,
)


def test_nothing_is_kept_and_no_error_is_the_fleets_own(tmp_path: Path) -> None:
    model = make_base(tmp_path / "model", vocab_size=448, std=0.15, max_position_embeddings=4096)
    write_folder(model, byte_level(), chat_template=CHAT_TEMPLATE)
    with Cluster(model, tmp_path) as cluster, Fleet(cluster, SIZE) as fleet:
        soaked = soak(fleet, 3.0)
        assert faults(fleet, soaked) == []
        done = fleet.causes.done
    assert done["newcomer"] + done["vanish"] > 0 and done["operator: push"] > 0, done


def samples(value: Callable[[int], float], what: str) -> list[Sample]:
    """One a second for 400 s."""
    return [Sample(at, {what: value(at)}) for at in range(400)]


@pytest.mark.parametrize(
    ("what", "value", "is_flat"),
    [
        ("a rss_mb", lambda at: 200 + at * 0.1, False),
        ("a rss_mb", lambda at: min(300, 200 + at * 3), True),  # It was the warm-up.
        ("a rss_mb", lambda at: 200 + at * 0.02, True),
        ("a threads", lambda at: 20 + at // 40, False),
        ("a threads", lambda at: 20 + at % 40, True),
        ("redis keys blob", lambda at: 9 + at // 20, False),
        ("a running_sequences", lambda at: at, True),  # Traffic is no leak.
    ],
)
def test_a_leak_is_told_from_a_swing(what: str, value: Callable[[int], float], is_flat: bool) -> None:
    [flat] = flatness(samples(value, what))
    assert flat.is_flat is is_flat, flat


def test_only_what_was_done_explains_an_error() -> None:
    causes = Causes()
    error = Unavailable(grpc.StatusCode.UNAVAILABLE, "away", reason="STORE_UNAVAILABLE")
    before = time.monotonic() - 60
    with causes.lasting(Cause.STORE_AWAY):
        causes.judge(error, before, "geo", (Cause.STORE_AWAY,))
    assert causes.not_injected == [] and causes.injected.total() == 1
    for other, about, may_be in (
        (error, "geo", (Cause.WITHDRAWN,)),  # Such a call does not feel it.
        (Unavailable(grpc.StatusCode.UNAVAILABLE, "?", reason="NO_EXECUTOR"), "geo", (Cause.STORE_AWAY,)),
    ):
        causes.judge(other, time.monotonic(), about, may_be)
    causes.from_now_on(Cause.WITHDRAWN, "sha256:one")
    gone = AdapterNotFound(grpc.StatusCode.NOT_FOUND, "?", reason="ADAPTER_NOT_FOUND")
    causes.judge(gone, time.monotonic(), "brief@sha256:one", (Cause.WITHDRAWN,))
    causes.judge(gone, time.monotonic(), "brief@sha256:two", (Cause.WITHDRAWN,))
    assert len(causes.not_injected) == 3 and causes.injected.total() == 2
