"""Pins, drains, deletions and collections through the Adapters service, over both stores."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from adapter_store import DataLoss, ModelSpec, Ref
from lorafleet.v1 import adapters_pb2 as pb
from lorafleet.v1 import executor_pb2
from scheduler.adapters import retirement
from scheduler.dispatch.live_request import LiveRequest
from scheduler.errors import AdapterRemoved, ExecutorFailed
from scheduler.fleet.residency import Residency
from scheduler.text.tokenizer import Tokenizer
from tests.support.services.adapters_calls import (
    LONGER_THAN_A_DRAIN_S,
    Running,
    as_,
    pushed,
    refused,
    running_service,
)
from tests.support.services.fakes import FakeExecutor
from tests.support.services.scheduling import admitted, read_all, until
from tests.support.stores.media import DiskMedium, Medium, RedisMedium

pytestmark = pytest.mark.asyncio(loop_scope="module")
SLOT = pb.RESIDENCY_TIER_SLOT


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["disk", "redis"])
async def service(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    spec: ModelSpec,
    tokenizer: Tokenizer,
) -> AsyncIterator[Running]:
    url = ""
    if request.param == "redis":
        url = f"{request.getfixturevalue('redis_server').url}?namespace={uuid.uuid4().hex}"
    folder = tmp_path_factory.mktemp("service")
    async with running_service(folder, spec, tokenizer, store_url=url) as service:
        yield service


def running(service: Running, name: str, digest: str, tokens: int = 4000) -> LiveRequest:
    """An accepted request of acme/name."""
    request = admitted(uuid.uuid4().hex, digest=digest, max_new_tokens=tokens)
    object.__setattr__(request, "adapter", f"acme/{name}")
    return service.dispatcher.submit(request, None)


async def copies(service: Running, adapter: str = "", who: str = "acme") -> list[pb.AdapterResidency]:
    return list((await service.stub.Residency(pb.ResidencyRequest(adapter=adapter), **as_(who))).copies)


async def test_a_pin_is_answered_when_executors_hold_it_and_survives_their_restart(service: Running) -> None:
    digest = await pushed(service, "pinned", 1)
    one, two = sorted(fake.address for fake in service.executors)
    answer = await service.stub.Pin(pb.PinRequest(adapter="pinned", tier=SLOT), **as_("acme"))
    assert (answer.digest, list(answer.pinned), list(answer.missing)) == (digest, [one, two], [])
    rows = await copies(service, "pinned")
    assert [(row.executor, row.pinned, row.max_rank, row.loads) for row in rows] == [
        (one, True, 4, 1),
        (two, True, 4, 1),
    ]
    assert [list(row.adapters) for row in rows] == [["acme/pinned"]] * 2
    assert [row for row in await copies(service, who="root") if row.digest == digest] == rows
    assert not await copies(service, who="rival")

    fake = service.executors[0]
    fake.copies.clear()
    fake.break_after = 0
    await until(lambda: fake.streams == 2 and digest in fake.copies and fake.copies[digest].pinned)

    unpin = pb.UnpinRequest(adapter="pinned", executors=[one])
    assert (await service.stub.Unpin(unpin, **as_("acme"))).digest == digest
    by_address = {fake.address: fake for fake in service.executors}
    await until(lambda: not by_address[one].copies[digest].pinned)
    assert by_address[two].copies[digest].pinned
    dropped = await service.stub.Drop(pb.DropCopiesRequest(adapter="pinned"), **as_("acme"))
    assert (dropped.digest, list(dropped.remaining)) == (digest, [])
    assert await copies(service, "pinned") == []


async def test_a_copy_is_listed_with_every_name_that_shares_it(service: Running) -> None:
    names = ["twin-1", "twin-2"]
    [digest] = {await pushed(service, name, 80) for name in names}
    alone = await pushed(service, "no-twin", 81)
    for name in ("twin-1", "no-twin"):
        await service.stub.Pin(pb.PinRequest(adapter=name, tier=SLOT), **as_("acme"))
    listed = {(row.digest, *row.adapters) for row in await copies(service, who="root")}
    assert {(digest, "acme/twin-1", "acme/twin-2"), (alone, "acme/no-twin")} <= listed
    assert not await copies(service, who="curator")  # sees all adapters, and operates nothing
    for name in (*names, "no-twin"):
        await service.stub.Drop(pb.DropCopiesRequest(adapter=name), **as_("acme"))


async def test_a_pin_ends_with_its_version_also_for_an_executor_that_is_away(
    service: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retirement, "WATCHED_S", 0.5)
    digest = await pushed(service, "short-lived", 2)
    await service.stub.Pin(pb.PinRequest(adapter="short-lived", tier=SLOT), **as_("acme"))
    links = [service.dispatcher.fleet._links[fake.address] for fake in service.executors]
    away = links[0]
    away.state.limits, away.state.residency = None, Residency()  # As after the end of its stream.
    await service.stub.Delete(pb.DeleteAdapterRequest(adapter="short-lived"), **as_("acme"))
    await until(lambda: not any((digest, "acme/short-lived") in link.kept.pins for link in links))
    service.executors[0].break_after = 0
    await until(lambda: away.state.limits is not None)


@pytest.mark.parametrize(
    ("method", "request_", "code"),
    [
        ("Pin", pb.PinRequest(adapter="there"), "INVALID_ARGUMENT"),
        ("Pin", pb.PinRequest(adapter="there", tier=SLOT, executors=["nobody:1"]), "INVALID_ARGUMENT"),
        ("Unpin", pb.UnpinRequest(adapter="there", executors=["nobody:1"]), "INVALID_ARGUMENT"),
        ("Drop", pb.DropCopiesRequest(adapter="there", executors=["nobody:1"]), "INVALID_ARGUMENT"),
        *(
            (method, message(adapter=adapter), code)
            for method, message in (
                ("Pin", pb.PinRequest),
                ("Unpin", pb.UnpinRequest),
                ("Drop", pb.DropCopiesRequest),
                ("Drain", pb.DrainAdapterRequest),
                ("Activate", pb.ActivateRequest),
                ("DeleteDamaged", pb.DeleteDamagedRequest),
                ("Residency", pb.ResidencyRequest),
            )
            for adapter, code in (
                ("nobody", "NOT_FOUND"),
                ("rival/hidden", "NOT_FOUND"),
                ("@", "INVALID_ARGUMENT"),
            )
        ),
    ],
)
async def test_wrong_names_are_refused(service: Running, method: str, request_: Any, code: str) -> None:
    await pushed(service, "there", 2)
    await pushed(service, "hidden", 2, who="rival")
    error = await refused(getattr(service.stub, method)(request_, **as_("acme")))
    assert error.code().name == code


async def test_upkeep_needs_a_right(service: Running) -> None:
    await pushed(service, "there", 2)
    for method, request in (
        ("Pin", pb.PinRequest(adapter="there", tier=SLOT)),
        ("Drop", pb.DropCopiesRequest(adapter="there")),
        ("Drain", pb.DrainAdapterRequest(adapter="there")),
        ("Activate", pb.ActivateRequest(adapter="there")),
        ("DeleteDamaged", pb.DeleteDamagedRequest(adapter="there")),
        ("Collect", pb.CollectRequest()),
    ):
        error = await refused(getattr(service.stub, method)(request, **as_("reader")))
        assert error.code() == grpc.StatusCode.PERMISSION_DENIED


async def test_a_drain_waits_for_streams_and_frees_every_copy(service: Running) -> None:
    digest = await pushed(service, "draining", 3)
    live = running(service, "draining", digest)
    await until(lambda: bool(live.progress.output))
    drain = asyncio.ensure_future(
        service.stub.Drain(pb.DrainAdapterRequest(adapter="draining"), **as_("acme"))
    )
    await until(lambda: service.store.record("acme", "draining").versions[digest].state == "draining")
    await asyncio.sleep(LONGER_THAN_A_DRAIN_S)
    assert not drain.done() and not live.ended
    (row,) = [row for row in await copies(service) if row.digest == digest]
    assert (row.running, row.tier) == (1, SLOT) and row.last_use_ms > 0
    service.dispatcher.cancel(live)
    answer = await asyncio.wait_for(drain, 60)
    assert (answer.digest, list(answer.unreachable)) == (digest, [])
    assert all(digest not in fake.copies for fake in service.executors)
    listed = await service.stub.List(pb.ListAdaptersRequest(name="draining"), **as_("acme"))
    assert [version.state for version in listed.versions] == [pb.VERSION_STATE_DRAINING]


@pytest.mark.parametrize("call", ["Drain", "Drop"])
async def test_a_load_under_way_is_waited_for(service: Running, call: str) -> None:
    """It is in no report yet: neither its request's, which has ended, nor that of copies."""
    name = f"late-{call.lower()}"
    digest = await pushed(service, name, 30 + len(call))
    slow, quick = service.executors
    slow.loading.add(digest)
    message = {"Drain": pb.DrainAdapterRequest, "Drop": pb.DropCopiesRequest}[call]
    answer = asyncio.ensure_future(getattr(service.stub, call)(message(adapter=name), **as_("acme")))

    def told(fake: FakeExecutor) -> bool:
        return any(command.drop.digest == digest for command in fake.commands)

    (state,) = (each for each in service.dispatcher.fleet.states if each.address == quick.address)
    await until(lambda: answer.done() or (told(slow) and told(quick) and not state.may_hold(digest)))
    assert not answer.done()
    slow.loading.discard(digest)
    await asyncio.wait_for(answer, 60)
    assert not any(each.may_hold(digest) for each in service.dispatcher.fleet.states)


async def test_a_deleted_version_stays_readable_while_anybody_uses_it(service: Running) -> None:
    digest = await pushed(service, "going", 4)
    live = running(service, "going", digest)
    await until(lambda: bool(live.progress.output))
    await service.stub.Delete(pb.DeleteAdapterRequest(adapter="going"), **as_("acme"))
    assert (await refused(service.stub.Get(pb.GetAdapterRequest(adapter="going"), **as_("acme")))).code() == (
        grpc.StatusCode.NOT_FOUND
    )
    assert not (await service.stub.List(pb.ListAdaptersRequest(name="going"), **as_("acme"))).versions
    kept = await service.stub.Collect(pb.CollectRequest(), **as_("acme"))
    assert digest not in kept.digests
    service.store.open(digest).close()
    assert not live.ended
    service.dispatcher.cancel(live)
    await until(lambda: all(digest not in fake.copies for fake in service.executors))
    await until(lambda: digest not in {row.digest for row in service.dispatcher.fleet.residency()})
    tried = await service.stub.Collect(pb.CollectRequest(dry_run=True), **as_("acme"))
    gone = await service.stub.Collect(pb.CollectRequest(), **as_("acme"))
    assert tried == gone
    where = list(gone.digests).index(digest)
    assert gone.adapters[where] == "acme/going" and gone.num_bytes > 0
    assert digest not in (await service.stub.Collect(pb.CollectRequest(), **as_("acme"))).digests


async def test_collecting_leaves_alone_what_the_caller_does_not_see(service: Running) -> None:
    digest = await pushed(service, "theirs", 5, who="rival")
    await service.stub.Delete(pb.DeleteAdapterRequest(adapter="theirs"), **as_("rival"))
    assert digest not in (await service.stub.Collect(pb.CollectRequest(), **as_("acme"))).digests
    assert digest in (await service.stub.Collect(pb.CollectRequest(), **as_("rival"))).digests


async def test_rm_now_ends_requests_wherever_they_were_accepted(service: Running) -> None:
    digest, other = await pushed(service, "now", 6), await pushed(service, "other", 7)
    live, neighbour = running(service, "now", digest), running(service, "other", other)
    await until(lambda: bool(live.progress.output and neighbour.progress.output))
    # Another scheduler's deletion: this one hears of it from the store.
    ref = (await service.stub.Get(pb.GetAdapterRequest(adapter="now"), **as_("acme"))).version.digest
    assert ref == digest
    service.store.withdraw(_digest_ref("now", digest), force=True, end_requests=True)
    with pytest.raises(AdapterRemoved, match=digest):
        await read_all(live)
    await until(lambda: all(digest not in fake.copies for fake in service.executors))
    assert not neighbour.ended
    service.dispatcher.cancel(neighbour)


async def test_rm_is_refused_while_something_points_there_unless_forced(service: Running) -> None:
    digest = await pushed(service, "held", 8)
    await service.stub.SetAlias(pb.SetAliasRequest(adapter="held@prod", target=digest), **as_("acme"))
    by_digest = pb.DeleteAdapterRequest(adapter=f"held@{digest}")
    assert (await refused(service.stub.Delete(by_digest, **as_("acme")))).code() == (
        grpc.StatusCode.FAILED_PRECONDITION
    )
    by_digest.force = True
    await service.stub.Delete(by_digest, **as_("acme"))
    assert not (await service.stub.ListAliases(pb.ListAliasesRequest(name="held"), **as_("acme"))).aliases


async def test_split_aliases_over_the_wire(service: Running) -> None:
    first, second = await pushed(service, "split", 10), await pushed(service, "split", 11)
    targets = [pb.AliasTarget(target=first, weight=90), pb.AliasTarget(target="latest", weight=10)]
    request = pb.SetAliasRequest(adapter="split@prod", targets=targets)
    alias = (await service.stub.SetAlias(request, **as_("acme"))).alias
    assert (alias.digest, {each.target: each.weight for each in alias.targets}) == (
        first,
        {first: 90, second: 10},
    )
    listed = (await service.stub.ListAliases(pb.ListAliasesRequest(name="split"), **as_("acme"))).aliases
    assert alias in listed
    for bad in (
        {"target": first, "targets": targets},
        {"targets": [pb.AliasTarget(target=first)]},
        {"targets": targets * 20},
    ):
        error = await refused(
            service.stub.SetAlias(pb.SetAliasRequest(adapter="split@prod", **bad), **as_("acme"))
        )
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_damage_is_found_put_into_quarantine_and_counted(
    service: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = await pushed(service, "rotten", 12)
    alarms = "lorafleet_scheduler_data_loss_total"
    before = service.registry.get_sample_value(alarms) or 0
    verify = service.store.verify

    def damaged(ref: Ref) -> Any:
        if ref.digest == digest:
            raise DataLoss("its bytes are other ones")
        return verify(ref)

    monkeypatch.setattr(service.store, "verify", damaged)
    found = await service.stub.Verify(pb.VerifyRequest(), **as_("acme"))
    assert dict(found.damaged) == {digest: "acme/rotten: its bytes are other ones"}
    assert service.registry.get_sample_value(alarms) == before + 1
    version = (await service.stub.Get(pb.GetAdapterRequest(adapter="rotten"), **as_("acme"))).version
    assert version.quarantined
    with pytest.raises(DataLoss):
        service.versions.resolve(_digest_ref("rotten", digest))
    monkeypatch.undo()
    await pushed(service, "rotten", 12)
    assert service.versions.resolve(_digest_ref("rotten", digest)).digest == digest


async def test_damage_that_an_executor_meets_is_looked_into(
    service: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own copy may be damaged, or what is stored: only then is the version put into quarantine."""
    whole, rotten = await pushed(service, "suspected", 13), await pushed(service, "worse", 14)
    verify = service.store.verify

    def damaged(ref: Ref) -> Any:
        if ref.digest == rotten:
            raise DataLoss("its bytes are other ones")
        return verify(ref)

    def reject(dispatch: executor_pb2.Dispatch) -> executor_pb2.Rejected | None:
        if dispatch.digest in (whole, rotten):
            code = grpc.StatusCode.DATA_LOSS.value[0]
            return executor_pb2.Rejected(message="damaged", reason="DATA_LOSS", code=code)
        return None

    monkeypatch.setattr(service.store, "verify", damaged)
    for fake in service.executors:
        monkeypatch.setattr(fake, "reject", reject)
    for name, digest in (("suspected", whole), ("worse", rotten)):
        with pytest.raises(ExecutorFailed):
            await read_all(running(service, name, digest))
    await until(lambda: service.store.record("acme", "worse").versions[rotten].quarantined)
    assert not service.store.record("acme", "suspected").versions[whole].quarantined


async def test_summaries_are_the_same_pages_without_modules(service: Running) -> None:
    whole = await service.stub.List(pb.ListAdaptersRequest(), **as_("acme"))
    short = await service.stub.List(pb.ListAdaptersRequest(summary=True), **as_("acme"))
    for version in whole.versions:
        assert version.modules and version.dtypes
        for field in ("modules", "dtypes", "warnings", "push_warnings", "has_chat_template"):
            version.ClearField(field)
    assert whole == short


async def test_a_damaged_record_is_told_and_hides_nothing_else(
    service: Running, request: pytest.FixtureRequest
) -> None:
    digest = await pushed(service, "torn", 15)
    await pushed(service, "beside", 16)
    url, _, namespace = service.url.partition("?namespace=")
    medium: Medium = DiskMedium(Path(url))
    if namespace:
        medium = RedisMedium(request.getfixturevalue("redis_server"), namespace)
    alarms = "lorafleet_scheduler_data_loss_total"
    before = service.registry.get_sample_value(alarms) or 0

    def flipped(record: bytes) -> bytes:
        return record[:-1] + bytes([record[-1] ^ 1])

    medium.change_record("acme", "torn", flipped)
    try:
        listed = (await service.stub.ListAliases(pb.ListAliasesRequest(), **as_("acme"))).aliases
        assert "beside" in {alias.name for alias in listed} and "torn" not in {alias.name for alias in listed}
        one = pb.ListAliasesRequest(name="torn")
        assert (await refused(service.stub.ListAliases(one, **as_("acme")))).code() == (
            grpc.StatusCode.DATA_LOSS
        )
        found = await service.stub.Verify(pb.VerifyRequest(), **as_("acme"))
        assert found.damaged["acme/torn"] == "what the store says of acme/torn is damaged"
        assert (service.registry.get_sample_value(alarms) or 0) > before
        seen_by_all = await service.stub.Verify(pb.VerifyRequest(), **as_("root"))
        assert "acme/torn" in seen_by_all.damaged and seen_by_all.verified >= 1  # root has none of its own
        assert list(seen_by_all.orphans) == []
        assert "acme/torn" not in (await service.stub.Verify(pb.VerifyRequest(), **as_("rival"))).damaged
        remove = pb.DeleteDamagedRequest(adapter="acme/torn", dry_run=True)
        told = await service.stub.DeleteDamaged(remove, **as_("acme"))
        assert (told.adapter, list(told.digests), told.num_bytes > 0) == ("acme/torn", [digest], True)
        for request_, who, code in (
            (remove, "rival", "NOT_FOUND"),
            (pb.DeleteDamagedRequest(adapter="torn@latest"), "acme", "INVALID_ARGUMENT"),
            (pb.DeleteDamagedRequest(adapter="beside"), "acme", "INVALID_ARGUMENT"),
        ):
            error = await refused(service.stub.DeleteDamaged(request_, **as_(who)))
            assert error.code().name == code
    finally:
        medium.change_record("acme", "torn", flipped)
    assert not (await service.stub.Verify(pb.VerifyRequest(), **as_("acme"))).damaged


def _digest_ref(name: str, digest: str) -> Ref:
    return Ref("acme", name, digest=digest)
