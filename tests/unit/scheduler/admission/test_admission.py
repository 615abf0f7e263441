"""Requests to admitted requests, over a real store, tokenizer and model folder."""

import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from adapter_store import DiskStore, ModelSpec, NameRecord, PushOptions, Ref, Version, VersionState
from lorafleet.v1 import common_pb2, inference_pb2
from scheduler import errors
from scheduler.admission.admission import Admission, Identity
from scheduler.admission.constraints import Constraints
from scheduler.admission.identity import INFER, MANAGE, PUSH
from scheduler.admission.versions import Versions
from scheduler.text.tokenizer import Tokenizer

ACME = Identity("acme", frozenset({INFER, PUSH, MANAGE}), ("acme/*", "shared/*"))
Request = inference_pb2.GenerateRequest


@dataclasses.dataclass(frozen=True)
class Stored:
    support: Version  # acme/support@latest, rank 4
    older: Version  # the same name, no alias
    shared: Version  # shared/legal, brings a chat template
    secret: Version  # rival/secret


@pytest.fixture
def stored(store: DiskStore, spec: ModelSpec, peft_folder: Callable[..., Path]) -> Stored:
    return Stored(
        older=store.put(peft_folder(1, rank=2), "acme", "support", spec),
        support=store.put(peft_folder(2), "acme", "support", spec),
        shared=store.put(peft_folder(3, chat_template="{{ messages[0].content }}!"), "shared", "legal", spec),
        secret=store.put(peft_folder(4), "rival", "secret", spec),
    )


def asking(store: DiskStore) -> Versions:
    """With the store's news of now: for tests that take less than its patience."""
    versions = Versions(store, 3600.0)
    versions.ask()
    return versions


@pytest_asyncio.fixture
async def admission(
    store: DiskStore, tokenizer: Tokenizer, spec: ModelSpec, constraints: Constraints
) -> AsyncIterator[Admission]:
    with ThreadPoolExecutor(2) as pool:
        admission = Admission(asking(store), tokenizer, spec, 100, pool, constraints=constraints)
        yield admission
        await admission.close()


async def test_a_base_request_is_completed(admission: Admission, tokenizer: Tokenizer) -> None:
    admitted = await admission.admit(Request(text="Hello 你好"), ACME)
    assert admitted.prompt_token_ids == tuple(tokenizer.encode("Hello 你好"))
    assert (admitted.adapter, admitted.digest, admitted.max_rank) == ("", "", 0)
    assert (admitted.modules, admitted.resumed_token_ids, admitted.echo_text) == (frozenset(), (), "")
    assert admitted.stopping.max_new_tokens == 100 - len(admitted.prompt_token_ids)
    assert admitted.sampling.HasField("seed")
    assert admitted.request_id


async def test_names_and_seeds_are_drawn_apart_and_kept_when_given(admission: Admission) -> None:
    first, second = [await admission.admit(Request(text="x"), ACME) for _ in range(2)]
    assert first.request_id != second.request_id
    assert first.sampling.seed != second.sampling.seed
    given = Request(text="x", request_id="mine", sampling=common_pb2.Sampling(seed=0))
    admitted = await admission.admit(given, ACME)
    assert (admitted.request_id, admitted.sampling.seed) == ("mine", 0)


@pytest.mark.parametrize("ref", ["support", "acme/support", "support@latest"])
async def test_a_ref_is_resolved_to_its_digest(admission: Admission, stored: Stored, ref: str) -> None:
    admitted = await admission.admit(Request(text="x", adapter=ref), ACME)
    assert (admitted.adapter, admitted.digest) == ("acme/support", stored.support.digest)
    assert (admitted.max_rank, admitted.modules) == (4, {"q_proj"})


async def test_a_digest_ref_and_another_tenant_s_visible_adapter(
    admission: Admission, stored: Stored
) -> None:
    admitted = await admission.admit(Request(text="x", adapter=f"support@{stored.older.digest}"), ACME)
    assert (admitted.digest, admitted.max_rank) == (stored.older.digest, 2)
    assert (await admission.admit(Request(text="x", adapter="shared/legal"), ACME)).adapter == "shared/legal"


@pytest.mark.parametrize(
    ("ref", "error"),
    [
        ("suport", errors.AdapterNotFound),
        ("support@v2", errors.AdapterNotFound),
        ("support@sha256:" + "0" * 64, errors.AdapterNotFound),
        ("rival/secret", errors.AdapterNotFound),
        ("rival/unknown", errors.AdapterNotFound),
        ("Support", errors.InvalidRequest),
        (" support", errors.InvalidRequest),
        ("support ", errors.InvalidRequest),
        ("", errors.InvalidRequest),
        ("acme/../rival/secret", errors.InvalidRequest),
        ("../rival/secret", errors.InvalidRequest),
        ("/acme/support", errors.InvalidRequest),
        ("acme\\support", errors.InvalidRequest),
        ("acme%2Fsupport", errors.InvalidRequest),
        ("support\0", errors.InvalidRequest),
        ("s" * 300, errors.InvalidRequest),
    ],
)
async def test_a_wrong_ref_is_never_the_base(
    admission: Admission, stored: Stored, ref: str, error: type[errors.SchedulerError]
) -> None:
    with pytest.raises(error):
        await admission.admit(Request(text="x", adapter=ref), ACME)
    with pytest.raises(error):
        await admission.tokenize(inference_pb2.TokenizeRequest(text="x", adapter=ref), ACME)


async def test_a_digest_of_another_name_is_not_found(
    admission: Admission, store: DiskStore, stored: Stored, spec: ModelSpec, peft_folder: Callable[..., Path]
) -> None:
    other = store.put(peft_folder(9), "acme", "other", spec)
    with pytest.raises(errors.AdapterNotFound):
        await admission.admit(Request(text="x", adapter=f"support@{other.digest}"), ACME)
    resumed = inference_pb2.Resume(adapter_digest=other.digest)
    with pytest.raises(errors.AdapterNotFound):
        await admission.admit(Request(text="x", adapter="support", resume=resumed), ACME)


async def test_invisible_and_unknown_look_and_cost_the_same(
    tokenizer: Tokenizer, spec: ModelSpec, constraints: Constraints, tmp_path: Path, stored: Stored
) -> None:
    class Counting(DiskStore):
        calls: list[str]

        def record(self, tenant: str, name: str) -> NameRecord:
            self.calls.append("record")
            return super().record(tenant, name)

    counting = Counting(tmp_path / "store")
    counting.calls = []
    texts = []
    with ThreadPoolExecutor(1) as pool:
        admission = Admission(asking(counting), tokenizer, spec, 100, pool, constraints=constraints)
        for name in ("rival/secret", "rival/nobody"):
            with pytest.raises(errors.AdapterNotFound) as caught:
                await admission.admit(Request(text="x", adapter=name), ACME)
            texts.append(str(caught.value).replace(name, "NAME"))
    assert texts[0] == texts[1]
    assert counting.calls == ["record", "record"]


async def test_without_the_right_what_is_visible_is_refused_and_the_rest_unknown(
    admission: Admission, stored: Stored
) -> None:
    manager = dataclasses.replace(ACME, rights=frozenset({MANAGE}))
    for ref in ("support", None):
        with pytest.raises(errors.PermissionDenied):
            await admission.admit(Request(text="x", adapter=ref), manager)
    with pytest.raises(errors.AdapterNotFound):
        await admission.admit(Request(text="x", adapter="rival/secret"), manager)


async def test_a_version_for_another_base_is_refused(
    store: DiskStore, tokenizer: Tokenizer, spec: ModelSpec, constraints: Constraints, stored: Stored
) -> None:
    other = dataclasses.replace(spec, modules={**spec.modules, "q_proj": (64, 128)})
    with ThreadPoolExecutor(1) as pool:
        admission = Admission(asking(store), tokenizer, other, 100, pool, constraints=constraints)
        with pytest.raises(errors.IncompatibleAdapter, match=r"layers\.0\.q_proj"):
            await admission.admit(Request(text="x", adapter="support"), ACME)


async def test_chat_goes_through_the_adapter_s_template_or_the_model_s(
    admission: Admission, stored: Stored, tokenizer: Tokenizer
) -> None:
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="Hi")])
    rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    for ref, text in ((None, rendered), ("support", rendered), ("shared/legal", "Hi!")):
        expected = tuple(tokenizer.encode(text, add_special_tokens=False))
        admitted = await admission.admit(Request(chat=chat, adapter=ref), ACME)
        assert admitted.prompt_token_ids == expected
        request = inference_pb2.TokenizeRequest(chat=chat, adapter=ref)
        assert (await admission.tokenize(request, ACME))[0] == expected


async def test_what_an_adapter_s_folder_says_about_text_holds_for_its_requests(
    store: DiskStore,
    tokenizer: Tokenizer,
    spec: ModelSpec,
    constraints: Constraints,
    peft_folder: Callable[..., Path],
) -> None:
    folder, end = peft_folder(9), "<|endoftext|>"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    store.put(folder, "acme", "own", spec)
    end_id = tokenizer.encode(end)[0]
    assert end_id not in tokenizer.eos_token_ids
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="Hi")])
    with ThreadPoolExecutor(2) as pool:
        admission = Admission(asking(store), tokenizer, spec, 100, pool, constraints=constraints)
        admitted = await admission.admit(Request(chat=chat, adapter="own"), ACME)
        assert admitted.prompt_token_ids == tuple(tokenizer.encode(f"Hi{end}", add_special_tokens=False))
        for asked, ends in ({}, [end_id]), ({"stop_token_ids": [5, end_id]}, [5, end_id]):
            request = Request(text="x", adapter="own", stopping=common_pb2.Stopping(**asked))
            assert [*(await admission.admit(request, ACME)).stopping.stop_token_ids] == ends
        request = Request(text="x", adapter="own", stopping=common_pb2.Stopping(ignore_eos=True))
        assert [*(await admission.admit(request, ACME)).stopping.stop_token_ids] == []
        assert [*(await admission.admit(Request(text="x"), ACME)).stopping.stop_token_ids] == []
        await admission.close()


@pytest.mark.parametrize(
    ("fields", "named", "text"),
    [
        ({"text": ""}, "prompt", "no tokens"),
        ({"token_ids": inference_pb2.TokenIds()}, "prompt", "no tokens"),
        (
            {"token_ids": inference_pb2.TokenIds(ids=[1] * 100)},
            "prompt",
            "has 100 tokens; the model takes 100",
        ),
        ({"token_ids": inference_pb2.TokenIds(ids=[1, 512])}, "token_ids.ids[1]", "512"),
        ({"text": "好 " * 99}, "prompt", "the model takes 100 tokens"),
        ({"text": "a" * 10**6}, "prompt", "has 1000000 characters"),
        ({"text": "x", "sampling": common_pb2.Sampling(top_p=float("nan"))}, "sampling.top_p", "nan"),
        (
            {"text": "x", "stopping": common_pb2.Stopping(min_new_tokens=100)},
            "stopping.min_new_tokens",
            "100",
        ),
        ({"text": "x", "resume": inference_pb2.Resume(adapter_digest="x")}, "resume.adapter_digest", "base"),
    ],
)
async def test_what_is_wrong_is_named(
    admission: Admission, fields: dict[str, Any], named: str, text: str
) -> None:
    with pytest.raises(errors.InvalidRequest, match=text) as caught:
        await admission.admit(Request(**fields), ACME)
    assert caught.value.violations[0][0] == named


async def test_a_resumption_keeps_version_seed_and_tokens(
    admission: Admission, stored: Stored, store: DiskStore
) -> None:
    """The alias has moved since: the stream goes on with the version it began with."""
    resume = inference_pb2.Resume(adapter_digest=stored.older.digest, seed=7, output_token_ids=[5, 6])
    request = Request(
        text="x", adapter="support", resume=resume, response=inference_pb2.ResponseOptions(echo=True)
    )
    admitted = await admission.admit(request, ACME)
    assert (admitted.digest, admitted.sampling.seed) == (stored.older.digest, 7)
    assert (admitted.resumed_token_ids, admitted.echo_text) == ((5, 6), "")


@pytest.mark.parametrize(
    ("adapter", "digest", "error"),
    [
        ("support", "", errors.InvalidRequest),
        ("support", "latest", errors.InvalidRequest),
        ("support", "sha256:" + "0" * 64, errors.AdapterNotFound),
        ("support", "secret", errors.InvalidRequest),
        ("rival/secret", "secret digest", errors.AdapterNotFound),
        ("support", "secret digest", errors.AdapterNotFound),
    ],
)
async def test_a_resumption_names_a_version_of_that_adapter(
    admission: Admission, stored: Stored, adapter: str, digest: str, error: type[Exception]
) -> None:
    digest = stored.secret.digest if digest == "secret digest" else digest
    with pytest.raises(error):
        await admission.admit(
            Request(text="x", adapter=adapter, resume=inference_pb2.Resume(adapter_digest=digest)), ACME
        )


@pytest.mark.parametrize("state", list(VersionState)[1:])
async def test_a_resumption_goes_on_with_a_version_that_was_withdrawn_meanwhile(
    admission: Admission, stored: Stored, store: DiskStore, state: VersionState
) -> None:
    """It was accepted before, perhaps by a scheduler that is gone. New requests are not, nor is what
    `rm --now` ends."""
    digest = stored.older.digest
    ref = Ref("acme", "support", digest=digest)
    resumed = Request(text="x", adapter="support", resume=inference_pb2.Resume(adapter_digest=digest, seed=7))
    fresh = Request(text="x", adapter=f"support@{digest}")
    store.withdraw(ref, state)
    for _ in range(2):  # read, then remembered
        assert (await admission.admit(resumed, ACME)).digest == digest
        with pytest.raises(errors.AdapterNotFound):
            await admission.admit(fresh, ACME)
    admission._versions.forget("acme", "support")
    if state is VersionState.DRAINING:
        store.withdraw(ref, VersionState.DELETED, end_requests=True)
        with pytest.raises(errors.AdapterNotFound):
            await admission.admit(resumed, ACME)


async def test_salts_differ_by_tenant_and_client(admission: Admission) -> None:
    rival = dataclasses.replace(ACME, tenant="acme2")
    salts = {
        (await admission.admit(Request(text="x", cache_salt=salt), identity)).cache_salt
        for identity in (ACME, rival)
        for salt in ("", "2", "s")
    }
    assert len(salts) == 6
    assert all(len(salt) == 32 for salt in salts)


async def test_turns_of_a_session_have_one_key_where_they_can_share_a_prefix(
    admission: Admission, stored: Stored
) -> None:
    async def key(tenant: str = "acme", **fields: str) -> str:
        identity = dataclasses.replace(ACME, tenant=tenant)
        return (await admission.admit(Request(text="x", **fields), identity)).session

    turn = await key(session_id="s")
    assert turn and turn == await key(session_id="s", request_id="another")
    others = [
        await key("acme2", session_id="s"),
        await key(session_id="t"),
        await key(session_id="s", cache_salt="2"),
        await key(session_id="s", adapter=f"acme/support@{stored.support.digest}"),
    ]
    assert len({turn, *others}) == 5
    assert await key() == ""


async def test_echo_is_the_prompt(admission: Admission, tokenizer: Tokenizer) -> None:
    echo = inference_pb2.ResponseOptions(echo=True)
    assert (
        await admission.admit(Request(text="Hi <|im_end|>", response=echo), ACME)
    ).echo_text == "Hi <|im_end|>"
    ids = tokenizer.encode("Hi 好")
    half = next(i for i in range(512) if tokenizer.token_bytes(i) == "好".encode()[:1])
    for tail, text in (([], "Hi 好"), ([half], "Hi 好")):
        request = Request(token_ids=inference_pb2.TokenIds(ids=ids + tail), response=echo)
        assert (await admission.admit(request, ACME)).echo_text == text


@pytest.mark.parametrize("state", list(VersionState)[1:])
async def test_what_is_withdrawn_while_its_request_is_made_ready_is_not_accepted(
    store: DiskStore,
    tokenizer: Tokenizer,
    spec: ModelSpec,
    constraints: Constraints,
    stored: Stored,
    state: VersionState,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The prompt takes its time; the news come meanwhile. What has not been heard of yet may be accepted."""
    encode, ref = Tokenizer.encode, Ref("acme", "support", digest=stored.older.digest)
    heard = [True]

    def slow(self: Tokenizer, text: str, **options: Any) -> list[int]:
        DiskStore(store._root).withdraw(ref, state)
        if heard[0]:
            versions.ask()
        return encode(self, text, **options)

    with ThreadPoolExecutor(2) as pool:
        versions = asking(store)
        admission = Admission(versions, tokenizer, spec, 100, pool, constraints=constraints)
        request = Request(text="x", adapter=f"support@{stored.older.digest}")
        assert (await admission.admit(request, ACME)).digest == stored.older.digest
        monkeypatch.setattr(Tokenizer, "encode", slow)
        with pytest.raises(errors.AdapterNotFound):
            await admission.admit(request, ACME)
        again = tmp_path / "again"
        store.export(ref, again)
        store.put(again, "acme", "support", spec, PushOptions(alias=None))
        versions.ask()
        heard[0] = False
        assert (await admission.admit(request, ACME)).digest == stored.older.digest
        await admission.close()


async def test_an_alias_that_moves_on_while_its_request_is_made_ready_is_followed(
    store: DiskStore,
    tokenizer: Tokenizer,
    spec: ModelSpec,
    constraints: Constraints,
    stored: Stored,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From a version that is withdrawn at once: the alias was there all the time."""
    encode, older, newer = Tokenizer.encode, stored.older.digest, stored.support.digest
    store.set_alias("acme", "support", "prod", older)

    def slow(self: Tokenizer, text: str, **options: Any) -> list[int]:
        monkeypatch.undo()
        store.set_alias("acme", "support", "prod", newer)
        store.withdraw(Ref("acme", "support", digest=older), VersionState.DRAINING)
        versions.ask()
        return encode(self, text, **options)

    with ThreadPoolExecutor(2) as pool:
        versions = asking(store)
        admission = Admission(versions, tokenizer, spec, 100, pool, constraints=constraints)
        monkeypatch.setattr(Tokenizer, "encode", slow)
        request = Request(text="x", adapter="support@prod")
        assert (await admission.admit(request, ACME)).digest == newer
        await admission.close()
