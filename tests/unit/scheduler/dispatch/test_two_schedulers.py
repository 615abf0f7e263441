"""Two schedulers over one store, each with executors of its own, and neither sees the queue of the other.

What one has accepted keeps its bytes, whatever the other is told to drain or collect; and names that share a
content do not disturb each other.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from adapter_store import AdapterNotFound, Lease, ModelSpec, Ref
from lorafleet.v1 import adapters_pb2 as pb
from scheduler.dispatch.live_request import LiveRequest
from scheduler.text.tokenizer import Tokenizer
from tests.support.services.adapters_calls import (
    LONGER_THAN_A_DRAIN_S,
    Running,
    as_,
    pushed,
    running_service,
)
from tests.support.services.scheduling import admitted, until
from tests.support.stores.media import DiskMedium, Medium, RedisMedium
from tests.support.stores.redis_server import RedisServer

pytestmark = pytest.mark.asyncio(loop_scope="module")
SLOT = pb.RESIDENCY_TIER_SLOT


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["disk", "redis"])
async def both(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    spec: ModelSpec,
    tokenizer: Tokenizer,
) -> AsyncIterator[tuple[Running, Running]]:
    url = str(tmp_path_factory.mktemp("shared") / "store")
    if request.param == "redis":
        url = f"{request.getfixturevalue('redis_server').url}?namespace={uuid.uuid4().hex}"
    async with AsyncExitStack() as stack:
        here, there = [
            await stack.enter_async_context(
                running_service(tmp_path_factory.mktemp("service"), spec, tokenizer, store_url=url)
            )
            for _ in range(2)
        ]
        yield here, there


def accepted(service: Running, adapter: str, digest: str) -> LiveRequest:
    """A long one."""
    request = admitted(uuid.uuid4().hex, digest=digest, max_new_tokens=4000)
    object.__setattr__(request, "adapter", adapter)
    return service.dispatcher.submit(request, None)


def waiting(service: Running, adapter: str, digest: str) -> LiveRequest:
    """No executor takes it for now."""
    for state in service.dispatcher.fleet.states:
        state.cordoned = True
    return accepted(service, adapter, digest)


def uncordon(service: Running) -> None:
    for state in service.dispatcher.fleet.states:
        state.cordoned = False


def holds(service: Running, digest: str) -> bool:
    return any(digest in fake.copies for fake in service.executors)


def takes(service: Running, ref: Ref) -> bool:
    try:
        return service.versions.resolve(ref).digest == ref.digest
    except AdapterNotFound:
        return False


def medium_of(service: Running, redis_server: RedisServer) -> Medium:
    url, _, namespace = service.url.partition("?namespace=")
    return RedisMedium(redis_server, namespace) if namespace else DiskMedium(Path(url))


async def drain(service: Running, adapter: str, who: str = "acme") -> pb.DrainAdapterResponse:
    return await service.stub.Drain(pb.DrainAdapterRequest(adapter=adapter), **as_(who))


async def collect(service: Running, who: str = "acme") -> list[str]:
    return list((await service.stub.Collect(pb.CollectRequest(), **as_(who))).digests)


async def goes_when_its_request_has_gone(
    here: Running, there: Running, live: LiveRequest, digest: str
) -> None:
    """`live` waits there; the content stays for it, and no longer."""
    for _ in range(3):
        assert digest not in await collect(here)
    here.store.open(digest).close()
    there.dispatcher.cancel(live)
    uncordon(there)
    await until(lambda: there.dispatcher.num_live == 0)
    async with asyncio.timeout(60):
        while digest not in await collect(here):
            await asyncio.sleep(0.05)


async def test_a_drain_waits_for_what_another_scheduler_has_accepted(both: tuple[Running, Running]) -> None:
    here, there = both
    digest = await pushed(here, "wanted", 1)
    live = waiting(there, "acme/wanted", digest)
    draining = asyncio.ensure_future(drain(here, "wanted"))
    await asyncio.sleep(LONGER_THAN_A_DRAIN_S)
    assert not draining.done() and not live.ended
    uncordon(there)
    await until(lambda: bool(live.progress.output))
    assert not draining.done()
    there.dispatcher.cancel(live)
    assert (await asyncio.wait_for(draining, 60)).digest == digest
    await until(lambda: not holds(there, digest))


async def test_bytes_stay_while_another_scheduler_has_a_request_that_waits(
    both: tuple[Running, Running],
) -> None:
    here, there = both
    digest = await pushed(here, "kept", 2)
    live = waiting(there, "acme/kept", digest)
    await here.stub.Delete(pb.DeleteAdapterRequest(adapter="kept"), **as_("acme"))
    await goes_when_its_request_has_gone(here, there, live, digest)


async def test_a_scheduler_that_was_killed_is_waited_for_until_its_lease_runs_out(
    both: tuple[Running, Running],
) -> None:
    here, _ = both
    kept, late = await pushed(here, "of-the-dead", 3), await pushed(here, "of-the-late", 4)
    for name in ("of-the-dead", "of-the-late"):
        await here.stub.Delete(pb.DeleteAdapterRequest(adapter=name), **as_("acme"))
    used = frozenset({("acme/of-the-dead", kept)})
    here.store.hold(Lease("dead", here.store.news(-1).number, used, seconds=60.0))
    gone = await collect(here)
    assert late in gone and kept not in gone
    # Cut off before it heard of the deletion: it may have anything, until it counts no more.
    here.store.hold(Lease("dead", -1, frozenset(), seconds=0.5))
    assert kept in await collect(here)
    assert "dead" not in {lease.holder for lease in here.store.leases()}


async def test_a_lease_ends_with_its_scheduler(
    both: tuple[Running, Running],
    tmp_path_factory: pytest.TempPathFactory,
    spec: ModelSpec,
    tokenizer: Tokenizer,
) -> None:
    here, _ = both
    before = {lease.holder for lease in here.store.leases()}
    assert len(before) == 2
    root = tmp_path_factory.mktemp("third")
    async with running_service(root, spec, tokenizer, store_url=here.url):
        assert len(here.store.leases()) == 3
    assert {lease.holder for lease in here.store.leases()} == before


async def test_names_with_the_same_content_do_not_disturb_each_other_s_drains(
    both: tuple[Running, Running],
) -> None:
    here, there = both
    digest = await pushed(here, "twin", 5)
    assert await pushed(here, "twin", 5, who="rival") == digest
    mine, theirs = accepted(here, "acme/twin", digest), accepted(here, "rival/twin", digest)
    elsewhere = accepted(there, "rival/twin", digest)
    await until(lambda: bool(mine.progress.output and theirs.progress.output and elsewhere.progress.output))
    here.dispatcher.cancel(mine)
    await asyncio.wait_for(drain(here, "twin"), 60)  # not for the other's streams
    assert not theirs.ended and not elsewhere.ended
    here.dispatcher.cancel(theirs)
    await asyncio.sleep(LONGER_THAN_A_DRAIN_S)
    assert holds(here, digest)  # it is active, so its next request finds it in a slot
    draining = asyncio.ensure_future(drain(here, "twin", who="rival"))
    await asyncio.sleep(LONGER_THAN_A_DRAIN_S)
    assert not draining.done()
    there.dispatcher.cancel(elsewhere)
    await asyncio.wait_for(draining, 60)
    await until(lambda: not holds(here, digest) and not holds(there, digest))


async def test_each_name_has_pins_of_its_own(both: tuple[Running, Running]) -> None:
    here, there = both
    digest = await pushed(here, "pinned", 6)
    await pushed(here, "pinned", 6, who="rival")
    for who in ("acme", "rival"):
        await here.stub.Pin(pb.PinRequest(adapter="pinned", tier=SLOT), **as_(who))
    await here.stub.Unpin(pb.UnpinRequest(adapter="pinned"), **as_("acme"))
    await until(lambda: all(list(fake.pins[digest]) == ["rival/pinned"] for fake in here.executors))
    assert all(fake.copies[digest].pinned for fake in here.executors)
    dropped = await here.stub.Drop(pb.DropCopiesRequest(adapter="pinned"), **as_("acme"))
    assert sorted(dropped.remaining) == sorted(fake.address for fake in here.executors)
    await drain(here, "pinned")
    assert all(fake.copies[digest].pinned for fake in here.executors)
    # Withdrawn by the other scheduler: the pins of this one end with the version, and then the copies go.
    await drain(there, "pinned", who="rival")
    await until(lambda: not holds(here, digest) and not here.dispatcher.fleet.pinned())


async def test_a_copy_of_another_name_keeps_no_deleted_version(both: tuple[Running, Running]) -> None:
    here, _ = both
    digest = await pushed(here, "going", 7)
    await pushed(here, "staying", 7)
    live = accepted(here, "acme/staying", digest)
    await until(lambda: bool(live.progress.output))
    await here.stub.Delete(pb.DeleteAdapterRequest(adapter="going"), **as_("acme"))
    assert digest in await collect(here)
    here.store.open(digest).close()
    assert not live.ended
    here.dispatcher.cancel(live)


async def test_a_push_ends_the_drain_of_its_content(both: tuple[Running, Running]) -> None:
    here, there = both
    digest = await pushed(here, "again", 8)
    live = accepted(here, "acme/again", digest)
    await until(lambda: bool(live.progress.output))
    draining = asyncio.ensure_future(drain(here, "again"))
    await until(lambda: here.store.record("acme", "again").versions[digest].state == "draining")
    await pushed(there, "again", 8)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(draining, 60)
    assert caught.value.code() == grpc.StatusCode.ABORTED and "pushed again" in caught.value.details()
    await asyncio.sleep(LONGER_THAN_A_DRAIN_S)
    assert holds(here, digest) and not live.ended
    here.dispatcher.cancel(live)


@pytest.mark.parametrize("again", ["push", "activate"])
async def test_what_one_scheduler_has_drained_takes_requests_again_through_another(
    both: tuple[Running, Running], again: str
) -> None:
    here, there = both
    digest = await pushed(here, f"back-by-{again}", 10)
    ref = Ref("acme", f"back-by-{again}", digest=digest)
    await asyncio.wait_for(drain(here, ref.name), 60)
    await until(lambda: not any(takes(each, ref) for each in both))
    if again == "push":
        await pushed(there, ref.name, 10)
    else:
        request = pb.ActivateRequest(adapter=ref.name)
        assert (await there.stub.Activate(request, **as_("acme"))).version.state == pb.VERSION_STATE_ACTIVE
    assert there.versions.resolve(ref).digest == digest
    await until(lambda: takes(here, ref))
    lives = [accepted(each, f"acme/{ref.name}", digest) for each in both]
    await until(lambda: all(live.progress.output for live in lives))
    await asyncio.sleep(LONGER_THAN_A_DRAIN_S)  # nobody frees its copies any more
    assert holds(here, digest) and holds(there, digest) and not any(live.ended for live in lives)
    for each, live in zip(both, lives, strict=True):
        each.dispatcher.cancel(live)


async def test_a_drain_ends_when_its_version_is_activated_elsewhere(both: tuple[Running, Running]) -> None:
    here, there = both
    digest = await pushed(here, "called-off", 11)
    live = accepted(here, "acme/called-off", digest)
    await until(lambda: bool(live.progress.output))
    draining = asyncio.ensure_future(drain(here, "called-off"))
    await until(lambda: here.store.record("acme", "called-off").versions[digest].state == "draining")
    await there.stub.Activate(pb.ActivateRequest(adapter="called-off"), **as_("acme"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(draining, 60)
    assert caught.value.code() == grpc.StatusCode.ABORTED and "activated" in caught.value.details()
    here.dispatcher.cancel(live)


async def test_bytes_of_a_damaged_name_stay_while_another_scheduler_has_a_request_of_it(
    both: tuple[Running, Running], redis_server: RedisServer
) -> None:
    here, there = both
    digest = await pushed(here, "torn", 12)
    live = waiting(there, "acme/torn", digest)
    medium_of(here, redis_server).change_record("acme", "torn", lambda record: b"{")
    gone = await here.stub.DeleteDamaged(pb.DeleteDamagedRequest(adapter="torn"), **as_("acme"))
    assert list(gone.digests) == [digest]
    await goes_when_its_request_has_gone(here, there, live, digest)


async def test_a_push_that_repairs_is_not_undone_by_a_check_that_began_before(
    both: tuple[Running, Running],
    redis_server: RedisServer,
    spec: ModelSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, there = both
    digest = await pushed(here, "mended", 9)
    ref, verify, repairs = Ref("acme", "mended", digest=digest), here.store.verify, list[str]()
    medium_of(here, redis_server).change_packed(digest, lambda data: data[:-1] + bytes([data[-1] ^ 1]))

    def repaired_meanwhile(ref: Ref) -> Any:
        try:
            return verify(ref)
        finally:
            repairs.append(there.store.put(here.folders / "9", "acme", "mended", spec).digest)

    monkeypatch.setattr(here.store, "verify", repaired_meanwhile)
    found = await here.stub.Verify(pb.VerifyRequest(adapter="mended"), **as_("acme"))
    assert len(repairs) == 2 and not found.damaged
    assert not here.store.find(ref).quarantined
