"""The Adapters service through a real server, store and ingest process."""

import json
from typing import Any

import grpc
import pytest

from lorafleet.v1 import adapters_pb2 as pb
from scheduler.adapters import listing
from tests.support.services.adapters_calls import Running, as_, parts, push, read_all, refused

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_pushed_found_listed_and_pulled_back_byte_for_byte(service: Running) -> None:
    files = service.content(1, chat_template="{{ messages }}")
    response = await push(service, "acme/one", files)
    version = response.version
    assert response.created
    assert (response.alias.alias, response.alias.digest, response.alias.generation) == (
        "latest",
        version.digest,
        1,
    )
    assert [(module.name, module.rank) for module in version.modules] == [("layers.0.q_proj", 4)]
    assert version.has_chat_template
    found = (await service.stub.Get(pb.GetAdapterRequest(adapter="one"), **as_("acme"))).version
    assert found == version
    assert list(found.aliases) == ["latest"]
    pulled = await read_all(service.stub.Pull(pb.PullRequest(adapter="one"), **as_("acme")))
    back: dict[str, bytes] = {}
    for message in pulled:
        back[message.chunk.name] = back.get(message.chunk.name, b"") + message.chunk.data
    assert back == files
    assert [message.total_bytes for message in pulled] == [sum(map(len, files.values()))] + [0] * (
        len(pulled) - 1
    )
    assert list(service.spool.iterdir()) == []


async def test_tenants_with_the_same_content_are_told_only_their_own(service: Running) -> None:
    content = service.content(77)
    config = json.loads(content["adapter_config.json"])
    for tenant in ("acme", "rival"):
        own = {"adapter_config.json": json.dumps(config | {"base_model_name_or_path": f"{tenant}/other"})}
        own |= {"README.md": f"by {tenant}", "tokenizer_config.json": f'{{"name_or_path": "{tenant}"}}'}
        files = content | {name: text.encode() for name, text in own.items()}
        pushed = (await push(service, f"{tenant}/same", files, who=tenant)).version
        [listed] = (await service.stub.List(pb.ListAdaptersRequest(name="same"), **as_(tenant))).versions
        found = (await service.stub.Get(pb.GetAdapterRequest(adapter="same"), **as_(tenant))).version
        assert pushed == found == listed
        assert found.base_model == f"{tenant}/other"
        [named] = [text for text in found.warnings if "base_model_name_or_path" in text]
        assert f"{tenant}/other" in named
        back: dict[str, bytes] = {}
        for message in await read_all(service.stub.Pull(pb.PullRequest(adapter="same"), **as_(tenant))):
            back[message.chunk.name] = back.get(message.chunk.name, b"") + message.chunk.data
        assert back == files


async def test_a_push_tells_what_its_template_fails_for(service: Running) -> None:
    template = "{{ messages[0].content }}{% if messages[2] %}{{ raise_exception('One turn') }}{% endif %}"
    response = await push(service, "one-turn", service.content(3, chat_template=template))
    [warning] = [text for text in response.version.warnings if "template" in text]
    assert warning.endswith("fails for a second message: the chat template says: One turn")
    broken = service.content(3, chat_template="{% for m in messages %}")
    error = await refused(push(service, "broken", broken))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT and "chat_template.jinja" in error.details()


async def test_a_template_is_tried_with_the_special_tokens_that_its_chats_will_have(service: Running) -> None:
    template = "{% if eos_token == '<|endoftext|>' %}{{ raise_exception('Mine') }}{% endif %}{{ messages }}"
    files = service.content(79, chat_template=template)
    await push(service, "bases-tokens", files)
    own = {"tokenizer_config.json": b'{"eos_token": "<|endoftext|>"}'}
    error = await refused(push(service, "own-tokens", files | own))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT and "says: Mine" in error.details()


async def test_what_is_in_force_is_told_and_what_an_older_client_does_not_send(service: Running) -> None:
    own = {"tokenizer_config.json": b'{"eos_token": "<|endoftext|>"}'}
    before = (await push(service, "own-ends", service.content(78) | own)).version
    assert [*before.end_token_ids] == [0] and before.special_tokens == {"eos_token": "<|endoftext|>"}
    assert "FILE_NOT_LOOKED_FOR" in {warning.reason for warning in before.push_warnings}
    ends = {"generation_config.json": b'{"eos_token_id": [1]}'}
    for files, header in ((own | ends, {}), (own, {"looked_for": ["generation_config.json"]})):
        version = (await push(service, "own-ends", service.content(78) | files, **header)).version
        assert "FILE_NOT_LOOKED_FOR" not in {warning.reason for warning in version.push_warnings}
        assert [*version.end_token_ids] == ([0, 1] if files != own else [0])


async def test_the_same_content_again_creates_nothing(service: Running) -> None:
    first = await push(service, "again", service.content(2))
    second = await push(service, "again", service.content(2))
    assert (first.created, second.created) == (True, False)
    assert second.version == first.version
    assert second.alias == first.alias


async def test_alias_and_dry_run_of_a_push(service: Running) -> None:
    tried = await push(service, "tried", service.content(3), dry_run=True)
    assert tried.created
    assert not tried.HasField("alias")
    assert (await refused(service.stub.Get(pb.GetAdapterRequest(adapter="tried"), **as_("acme")))).code() == (
        grpc.StatusCode.NOT_FOUND
    )
    none = await push(service, "tried", service.content(3), alias="")
    assert not none.HasField("alias")
    named = await push(service, "tried", service.content(3), alias="canary", expected_generation=0)
    assert (named.created, named.alias.alias, list(named.version.aliases)) == (False, "canary", ["canary"])
    behind = await refused(push(service, "tried", service.content(4), alias="canary", expected_generation=7))
    assert behind.code() == grpc.StatusCode.ABORTED


CALLS = [
    ("Get", pb.GetAdapterRequest),
    ("Delete", pb.DeleteAdapterRequest),
    ("Protect", pb.ProtectRequest),
    ("Unprotect", pb.UnprotectRequest),
    ("Verify", pb.VerifyRequest),
    ("Residency", pb.ResidencyRequest),
    ("DeleteAlias", pb.DeleteAliasRequest),
    ("SetAlias", lambda adapter: pb.SetAliasRequest(adapter=adapter, target="latest")),
]


@pytest.mark.parametrize(("method", "request_of"), CALLS)
async def test_another_tenant_s_adapter_is_as_unknown(service: Running, method: str, request_of: Any) -> None:
    await push(service, "secret", service.content(7), who="rival")
    details = []
    for name in ("secret", "nobody"):
        error = await refused(
            getattr(service.stub, method)(request_of(adapter=f"rival/{name}@latest"), **as_("acme"))
        )
        assert error.code() == grpc.StatusCode.NOT_FOUND
        details.append(error.details().replace(name, "NAME"))
    assert details[0] == details[1]
    assert (
        await service.stub.Get(pb.GetAdapterRequest(adapter="secret"), **as_("rival"))
    ).version.name == "secret"


async def test_streams_and_listings_show_no_other_tenant(service: Running) -> None:
    await push(service, "secret", service.content(7), who="rival")
    error = await refused(push(service, "rival/secret", service.content(8)))
    assert error.code() == grpc.StatusCode.NOT_FOUND
    error = await refused(read_all(service.stub.Pull(pb.PullRequest(adapter="rival/secret"), **as_("acme"))))
    assert error.code() == grpc.StatusCode.NOT_FOUND
    listed = await service.stub.List(pb.ListAdaptersRequest(tenant="rival"), **as_("acme"))
    aliases = await service.stub.ListAliases(pb.ListAliasesRequest(tenant="rival"), **as_("acme"))
    assert (len(listed.versions), len(aliases.aliases)) == (0, 0)


@pytest.mark.parametrize(("method", "request_of"), CALLS[1:])
async def test_changes_need_a_right(service: Running, method: str, request_of: Any) -> None:
    await push(service, "readable", service.content(9))
    error = await refused(
        getattr(service.stub, method)(request_of(adapter="readable@latest"), **as_("reader"))
    )
    assert error.code() == grpc.StatusCode.PERMISSION_DENIED
    assert (await service.stub.Get(pb.GetAdapterRequest(adapter="readable"), **as_("reader"))).version.name


async def test_pushing_needs_a_right_and_everything_a_token(service: Running) -> None:
    error = await refused(push(service, "readable", service.content(9), who="reader"))
    assert error.code() == grpc.StatusCode.PERMISSION_DENIED
    for call in (
        service.stub.Get(pb.GetAdapterRequest(adapter="readable")),
        service.stub.List(pb.ListAdaptersRequest()),
        service.stub.Push(parts("x", {})),
        read_all(service.stub.Pull(pb.PullRequest(adapter="readable"))),
    ):
        assert (await refused(call)).code() == grpc.StatusCode.UNAUTHENTICATED


async def test_aliases_are_set_listed_and_removed(service: Running) -> None:
    old = (await push(service, "moving", service.content(10))).version
    new = (await push(service, "moving", service.content(11))).version

    async def set_alias(target: str, generation: int | None = None) -> pb.AdapterAlias:
        request = pb.SetAliasRequest(adapter="moving@prod", target=target, expected_generation=generation)
        return (await service.stub.SetAlias(request, **as_("acme"))).alias

    assert (await set_alias(old.digest, 0)).generation == 1
    assert (await set_alias("latest", 1)).digest == new.digest
    assert (await refused(set_alias(old.digest, 1))).code() == grpc.StatusCode.ABORTED
    assert (await refused(set_alias("unknown"))).code() == grpc.StatusCode.NOT_FOUND
    assert (await refused(set_alias(""))).code() == grpc.StatusCode.INVALID_ARGUMENT
    listed = await service.stub.ListAliases(pb.ListAliasesRequest(name="moving"), **as_("acme"))
    assert [(alias.alias, alias.digest) for alias in listed.aliases] == [
        ("latest", new.digest),
        ("prod", new.digest),
    ]
    for adapter in ("moving", f"moving@{old.digest}"):
        error = await refused(service.stub.DeleteAlias(pb.DeleteAliasRequest(adapter=adapter), **as_("acme")))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    await service.stub.DeleteAlias(pb.DeleteAliasRequest(adapter="moving@prod"), **as_("acme"))
    error = await refused(
        service.stub.DeleteAlias(pb.DeleteAliasRequest(adapter="moving@prod"), **as_("acme"))
    )
    assert error.code() == grpc.StatusCode.NOT_FOUND


async def test_the_log_has_who_changed_what(service: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lorafleet.audit")
    digest = (await push(service, "told", service.content(80))).version.digest
    await push(service, "told", service.content(81), dry_run=True)  # changes nothing
    ref = f"told@{digest}"
    await service.stub.SetAlias(pb.SetAliasRequest(adapter="told@prod", target=digest), **as_("acme"))
    await service.stub.Protect(pb.ProtectRequest(adapter=ref), **as_("acme"))
    await service.stub.Unprotect(pb.UnprotectRequest(adapter=ref), **as_("acme"))
    await service.stub.DeleteAlias(pb.DeleteAliasRequest(adapter="told@prod"), **as_("acme"))
    await service.stub.Drain(pb.DrainAdapterRequest(adapter=ref), **as_("acme"))
    await service.stub.Activate(pb.ActivateRequest(adapter=ref), **as_("acme"))
    await service.stub.Delete(pb.DeleteAdapterRequest(adapter="told"), **as_("acme"))
    await refused(service.stub.Delete(pb.DeleteAdapterRequest(adapter="told"), **as_("acme")))
    told = [record for record in caplog.records if hasattr(record, "adapter")]
    assert [(record.getMessage(), record.adapter) for record in told] == [
        ("pushed", "acme/told"),
        ("alias set", "acme/told@prod"),
        ("protected", "acme/told"),
        ("unprotected", "acme/told"),
        ("alias removed", "acme/told@prod"),
        ("drained", "acme/told"),
        ("activated", "acme/told"),
        ("deleted", "acme/told"),
        ("failed", "told"),
    ]
    assert all(getattr(record, "digest", digest) == digest for record in told)
    assert {record.caller for record in told} == {"acme"} and all(record.peer for record in told)
    assert [record.code for record in told] == ["OK"] * 8 + ["NOT_FOUND"]


async def test_deletion_is_refused_while_something_points_there(service: Running) -> None:
    version = (await push(service, "going", service.content(12))).version
    by_digest = pb.DeleteAdapterRequest(adapter=f"going@{version.digest}")
    assert (await refused(service.stub.Delete(by_digest, **as_("acme")))).code() == (
        grpc.StatusCode.FAILED_PRECONDITION
    )
    kept = await service.stub.Protect(pb.ProtectRequest(adapter="going"), **as_("acme"))
    assert kept.version.protected
    by_alias = pb.DeleteAdapterRequest(adapter="going")
    assert (await refused(service.stub.Delete(by_alias, **as_("acme")))).code() == (
        grpc.StatusCode.FAILED_PRECONDITION
    )
    freed = await service.stub.Unprotect(pb.UnprotectRequest(adapter="going"), **as_("acme"))
    assert not freed.version.protected
    assert (await service.stub.Delete(by_alias, **as_("acme"))).digest == version.digest
    service.store.open(version.digest).close()
    assert (await refused(service.stub.Delete(by_alias, **as_("acme")))).code() == grpc.StatusCode.NOT_FOUND


async def test_pages_cover_everything_once(service: Running) -> None:
    for seed in range(20, 25):
        await push(service, f"shared/page-{seed}", service.content(seed))
    names, token, pages = [], "", 0
    while pages == 0 or token:
        request = pb.ListAdaptersRequest(tenant="shared", page_size=2, page_token=token)
        page = await service.stub.List(request, **as_("acme"))
        names += [version.name for version in page.versions]
        token, pages = page.next_page_token, pages + 1
    assert names == [f"page-{seed}" for seed in range(20, 25)]
    assert pages == 3
    for bad in ({"page_size": 1001}, {"page_token": "x" * 300}, {"name": "../x"}, {"tenant": "A"}):
        error = await refused(service.stub.List(pb.ListAdaptersRequest(**bad), **as_("acme")))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_tokens_of_pages_tell_nothing_of_what_is_not_seen(service: Running) -> None:
    for number, name in enumerate(("hidden-1", "hidden-2", "open-1", "open-2", "private-1", "private-2")):
        await push(service, name, service.content(60 + number))
    names, token, tokens = [], "", list[str]()
    while not tokens or token:
        request = pb.ListAdaptersRequest(page_size=1, page_token=token)
        page = await service.stub.List(request, **as_("guest"))
        names += [version.name for version in page.versions]
        tokens.append(token := page.next_page_token)
    assert names == ["open-1", "open-2"]
    assert [token.partition("@")[0] for token in tokens] == ["open-1", ""]


async def test_a_listing_reads_hardly_more_than_the_caller_may_see(
    service: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(12):
        await push(service, f"closed-{number}", service.content(70))
        await push(service, f"openers-{number}", service.content(70))
    for name in ("open-8", "open-9"):
        await push(service, name, service.content(70))
    read = list[str]()
    summaries = service.store.summaries

    def counted(*args: Any, **options: Any) -> Any:
        found = summaries(*args, **options)
        read.extend(each.name for each in found)
        return found

    monkeypatch.setattr(service.store, "summaries", counted)
    names, token = [], ""
    while not names or token:
        page = await service.stub.List(pb.ListAdaptersRequest(page_size=1, page_token=token), **as_("guest"))
        names += [version.name for version in page.versions]
        token = page.next_page_token
    assert {"open-8", "open-9"} <= set(names) and names == sorted(names)
    assert not {name for name in read if name.startswith("closed-")} and len(read) <= 3 * len(names) + 3
    read.clear()
    await service.stub.List(pb.ListAdaptersRequest(tenant="rival"), **as_("guest"))
    assert not read


async def test_pages_end_before_a_message_is_full(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MAX_PAGE_BYTES", 1)
    for seed in (50, 51):
        await push(service, "large", service.content(seed))
    digests, token, pages = set(), "", 0
    while pages == 0 or token:
        request = pb.ListAdaptersRequest(name="large", page_token=token)
        page = await service.stub.List(request, **as_("acme"))
        digests.update(version.digest for version in page.versions)
        token, pages = page.next_page_token, pages + 1
    assert (len(digests), pages) == (2, 2)


async def test_verify_tells_damage_apart(service: Running) -> None:
    good = (await push(service, "whole", service.content(30), who="rival")).version
    bad = (await push(service, "rotten", service.content(31), who="rival")).version
    await push(service, "shares-it", service.content(31), who="rival")
    fine = await service.stub.Verify(pb.VerifyRequest(), **as_("rival"))
    assert dict(fine.damaged) == {}
    (stored,) = [
        path
        for path in service.store_folder.rglob("*.safetensors")
        if bad.digest.removeprefix("sha256:") in str(path) and "packed" in path.name
    ] or [None]
    assert stored is not None
    data = bytearray(stored.read_bytes())
    data[-1] ^= 1
    stored.chmod(0o644)
    stored.write_bytes(data)
    found = await service.stub.Verify(pb.VerifyRequest(), **as_("rival"))
    assert list(found.damaged) == [bad.digest]
    assert found.damaged[bad.digest].startswith("rival/rotten, rival/shares-it: stored weights")
    assert found.verified == fine.verified
    one = await service.stub.Verify(pb.VerifyRequest(adapter="whole"), **as_("rival"))
    assert (one.verified, dict(one.damaged)) == (1, {})
    assert good.digest != bad.digest
