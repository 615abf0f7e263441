"""Wrong adapters and wrong changes: refused by name, nothing stays behind, a stream beside them unchanged."""

import json
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import load, save

from lorafleet.v1 import adapters_pb2 as pb
from lorafleet.v1 import common_pb2, inference_pb2
from tests.support.adapters import load_base, make_adapter, make_base
from tests.support.cluster import Cluster, Pair, wait_until
from tests.support.failures import Failure, Stubs, bearer, failure, piece, push_parts, raw_stubs
from tests.support.streams import Witness, undisturbed, witness

DIGEST = "sha256:" + "0" * 64
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Files = dict[str, bytes]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def watched(main: Pair, adapter: Callable[..., Path]) -> Iterator[Witness]:
    with main.client("ops") as client:
        client.adapters.push(adapter("quiet"), "quiet")
        client.adapters.push(adapter("theirs"), "acme/theirs")
    with witness(main, [5, 60, 70, 81] * 5, "quiet", 600, token="ops") as watched:
        yield watched


@pytest.fixture(autouse=True)
def unharmed(watched: Witness, stubs: Stubs, cluster: Cluster) -> Iterator[None]:
    """Versions, aliases and files are after a failure what they were before."""

    def state() -> tuple[Any, ...]:
        listed = [
            str(call(request(tenant=tenant), metadata=bearer("ops")))
            for tenant in ("default", "acme")
            for call, request in (
                (stubs.adapters.List, pb.ListAdaptersRequest),
                (stubs.adapters.ListAliases, pb.ListAliasesRequest),
            )
        ]
        deleted = pb.ListAdaptersRequest(summary=True, deleted=True, page_size=1000)
        gone = {
            version.digest.removeprefix("sha256:")
            for version in stubs.adapters.List(deleted, metadata=bearer("ops")).versions
            if version.state == pb.VERSION_STATE_DELETED
        }
        blobs = sorted(path.name for path in (cluster.store / "blobs").iterdir() if path.name not in gone)
        return listed, blobs, list((cluster.store / "tmp").iterdir())

    before = state()
    yield
    watched.moves_on()
    assert state() == before


@pytest.fixture(scope="module")
def stubs(main: Pair) -> Iterator[Stubs]:
    with raw_stubs(main.scheduler.address) as stubs:
        yield stubs


@pytest.fixture
def files(adapter: Callable[..., Path]) -> Files:
    folder = adapter("quiet")
    return {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}


def ours(found: Failure, code: str, reason: str) -> None:
    assert (found.code, found.reason, found.domain) == (code, reason, "lorafleet"), found
    assert "Traceback" not in found.message and "/tmp" not in found.message
    assert (found.retry_s is not None) == (code == "UNAVAILABLE")


def ask_for(adapter: str) -> Any:
    return inference_pb2.GenerateRequest(
        text="The quick", adapter=adapter, stopping=common_pb2.Stopping(max_new_tokens=2)
    )


def push_failure(stubs: Stubs, files: Mapping[str, bytes], name: str = "broken", **header: Any) -> Failure:
    return failure(stubs.adapters.Push, push_parts(name, files, **header), "ops")


def tensors(change: Callable[[Tensors], object], files: Files) -> Files:
    weights = load(files[WEIGHTS])
    change(weights)
    return {**files, WEIGHTS: save(weights)}


def config(files: Files, **fields: Any) -> Files:
    return {**files, CONFIG: json.dumps(json.loads(files[CONFIG]) | fields).encode()}


def without(name: str, files: Files) -> Files:
    return {other: data for other, data in files.items() if other != name}


def replaced(name: str, data: bytes, files: Files) -> Files:
    return {**files, name: data}


def as_pickle(files: Files) -> Files:
    return {**files, WEIGHTS: pickle.dumps({"a": [1.0]})}


def with_nan(weights: Tensors) -> None:
    weights[Q0][1, 2] = float("nan")


def with_odd_name(weights: Tensors) -> None:
    weights["base_model.model.model.layers.0.self_attn.qq_proj.lora_A.weight"] = weights[Q0].clone()


def with_extra_layer(weights: Tensors) -> None:
    for side in ("A", "B"):
        name = Q0.replace("lora_A", f"lora_{side}")
        weights[name.replace("layers.0", "layers.7")] = weights[name].clone()


def with_transposed(weights: Tensors) -> None:
    weights[Q0] = weights[Q0].T.contiguous()


MALFORMED: dict[str, tuple[Callable[[Files], Files], str]] = {
    "nan": (partial(tensors, with_nan), Q0),
    "missing half": (partial(tensors, lambda weights: weights.pop(Q0)), "layers.0.self_attn.q_proj"),
    "unknown tensor": (partial(tensors, with_odd_name), "qq_proj"),
    "wrong shape": (partial(tensors, with_transposed), "q_proj"),
    "no tensors": (partial(tensors, dict.clear), WEIGHTS),
    "pickle": (as_pickle, WEIGHTS),
    "cut off": (lambda files: {**files, WEIGHTS: files[WEIGHTS][:-100]}, WEIGHTS),
    "pointer": (
        partial(replaced, WEIGHTS, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        WEIGHTS,
    ),
    "huge header": (
        lambda files: {**files, WEIGHTS: (1 << 60).to_bytes(8, "little") + files[WEIGHTS][8:]},
        WEIGHTS,
    ),
    "extra bytes": (lambda files: {**files, WEIGHTS: files[WEIGHTS] + b"x"}, WEIGHTS),
    "empty weights": (partial(replaced, WEIGHTS, b""), WEIGHTS),
    "no weights": (partial(without, WEIGHTS), WEIGHTS),
    "no config": (partial(without, CONFIG), CONFIG),
    "config is no JSON": (partial(replaced, CONFIG, b"{"), CONFIG),
    "DoRA": (partial(config, use_dora=True), "use_dora"),
    "biases": (partial(config, lora_bias=True), "lora_bias"),
    "unknown field": (partial(config, use_magic=True), "use_magic"),
    "wrong rank": (partial(config, r=5), "rank"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_adapters_are_refused_by_name(stubs: Stubs, files: Files, case: str) -> None:
    """C41, C54, and the formats' cases."""
    change, named = MALFORMED[case]
    for dry_run in (True, False):
        found = push_failure(stubs, change(files), dry_run=dry_run)
        ours(found, "INVALID_ARGUMENT", "INVALID_REQUEST")
        assert found.fields == ("adapter",) and named in found.message, found.message
    ask = ask_for("broken")
    ours(failure(stubs.inference.Generate, ask, "ops"), "NOT_FOUND", "ADAPTER_NOT_FOUND")


HEADERS = [
    ({"name": ""}, "header.adapter"),
    ({"name": "../other"}, "header.adapter"),
    ({"name": "/abs/elsewhere"}, "header.adapter"),
    ({"name": "a/../../b"}, "header.adapter"),
    ({"name": "a\\..\\b"}, "header.adapter"),
    ({"name": "a%2fb"}, "header.adapter"),
    ({"name": "a\0b"}, "header.adapter"),
    ({"name": "."}, "header.adapter"),
    ({"name": "n" * 300}, "header.adapter"),
    ({"name": "dot. "}, "header.adapter"),
    ({"name": "name@alias"}, "header.adapter"),
    ({"alias": "Big"}, "header.alias"),
    ({"alias": "../x"}, "header.alias"),
    ({"alias": "", "expected_generation": 1}, "header.expected_generation"),
]


@pytest.mark.parametrize(("header", "field"), HEADERS)
def test_bad_names_touch_no_disk(stubs: Stubs, files: Files, header: dict[str, Any], field: str) -> None:
    """C53."""
    found = push_failure(stubs, files, **header)
    ours(found, "INVALID_ARGUMENT", "INVALID_REQUEST")
    assert found.fields == (field,) and field in found.message


PATHS = [
    "../other",
    "/abs/elsewhere",
    "a/../../b",
    "a\\..\\b",
    "a%2fb",
    "a\0b",
    "",
    ".",
    "n" * 300,
    "space ",
    "../acme/theirs",
    "quiet@../../theirs",
    "quiet@sha256:../../x",
]


@pytest.mark.parametrize("name", PATHS)
def test_names_that_are_paths_are_refused_by_every_call(stubs: Stubs, name: str) -> None:
    """C53: load, look, download and delete."""
    adapters, inference = stubs.adapters, stubs.inference
    calls: list[tuple[Any, Any]] = [
        (inference.Generate, ask_for(name)),
        (adapters.Get, pb.GetAdapterRequest(adapter=name)),
        (adapters.Pull, pb.PullRequest(adapter=name)),
        (adapters.Delete, pb.DeleteAdapterRequest(adapter=name, force=True)),
        (adapters.SetAlias, pb.SetAliasRequest(adapter=f"{name}@x", target=DIGEST)),
        (adapters.Drain, pb.DrainAdapterRequest(adapter=name)),
    ]
    for call, message in calls:
        found = failure(call, message, "ops")
        ours(found, "INVALID_ARGUMENT", "INVALID_REQUEST")


def test_bad_uploads_are_refused(stubs: Stubs, files: Files) -> None:
    header, *pieces = push_parts("broken", files)
    uploads: list[tuple[list[Any], str]] = [
        ([], "header"),
        (pieces, "header"),
        ([header], "chunk"),
        ([header, header, *pieces], "chunk"),
        ([header, pb.PushRequest()], "chunk"),
        ([header, piece("../adapter_config.json")], "chunk.name"),
        ([header, piece("/etc/adapter_config.json")], "chunk.name"),
        ([header, piece("")], "chunk.name"),
        ([header, piece("adapter_model.bin")], "chunk.name"),
        ([header, *pieces, pieces[0]], "chunk.name"),
        ([header, piece(CONFIG, bytes((4 << 20) + 1))], "chunk.data"),
    ]
    for parts, field in uploads:
        found = failure(stubs.adapters.Push, iter(parts), "ops")
        ours(found, "INVALID_ARGUMENT", "INVALID_REQUEST")
        assert found.fields == (field,), found


def test_an_upload_that_is_cut_off_leaves_nothing(stubs: Stubs, files: Files) -> None:
    made = threading.Event()  # gRPC reads from another thread, perhaps before it has returned the call

    def cut() -> Iterator[Any]:
        yield from list(push_parts("broken", files))[:2]
        made.wait()
        call.cancel()
        yield piece(WEIGHTS)

    call = stubs.adapters.Push.future(cut(), metadata=bearer("ops"))
    made.set()
    with pytest.raises(grpc.FutureCancelledError):
        call.result()


def test_adapters_of_another_base_are_refused(stubs: Stubs, files: Files, tmp_path: Path) -> None:
    deeper = push_failure(stubs, tensors(with_extra_layer, files))
    ours(deeper, "FAILED_PRECONDITION", "INCOMPATIBLE_ADAPTER")
    assert "layers.7" in deeper.message
    other = make_base(tmp_path / "other", vocab_size=448, hidden_size=32, num_attention_heads=2)
    folder = make_adapter(tmp_path / "adapter", load_base(other), seed=1)
    found = push_failure(stubs, {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)})
    ours(found, "FAILED_PRECONDITION", "INCOMPATIBLE_ADAPTER")
    assert "q_proj" in found.message or "layers.0" in found.message


def test_a_strict_push_refuses_another_name_of_the_base(stubs: Stubs, files: Files) -> None:
    renamed = config(files, base_model_name_or_path="acme/unheard-of")
    found = push_failure(stubs, renamed, strict_base=True)
    ours(found, "FAILED_PRECONDITION", "INCOMPATIBLE_ADAPTER")
    assert "acme/unheard-of" in found.message


def test_unknown_versions_and_aliases_are_not_found(stubs: Stubs) -> None:
    adapters = stubs.adapters
    for name in ("nobody", "quiet@nobody", f"quiet@{DIGEST}", "nobody/quiet"):
        calls: list[tuple[Any, Any]] = [
            (adapters.Get, pb.GetAdapterRequest(adapter=name)),
            (adapters.Pull, pb.PullRequest(adapter=name)),
            (adapters.Delete, pb.DeleteAdapterRequest(adapter=name)),
            (adapters.Protect, pb.ProtectRequest(adapter=name)),
            (adapters.Unprotect, pb.UnprotectRequest(adapter=name)),
            (adapters.Verify, pb.VerifyRequest(adapter=name)),
            (adapters.Residency, pb.ResidencyRequest(adapter=name)),
        ]
        for call, message in calls:
            found = failure(call, message, "ops")
            ours(found, "NOT_FOUND", "ADAPTER_NOT_FOUND")
            assert name in found.message
    missing = failure(adapters.DeleteAlias, pb.DeleteAliasRequest(adapter="quiet@nobody"), "ops")
    ours(missing, "NOT_FOUND", "ADAPTER_NOT_FOUND")
    target = pb.SetAliasRequest(adapter="quiet@new", target=DIGEST)
    ours(failure(adapters.SetAlias, target, "ops"), "NOT_FOUND", "ADAPTER_NOT_FOUND")


def test_other_tenants_see_nothing_and_guests_change_nothing(stubs: Stubs, files: Files) -> None:
    adapters = stubs.adapters
    for token in ("acme", "guest"):
        found = [
            failure(adapters.Get, pb.GetAdapterRequest(adapter=name), token)
            for name in ("default/quiet", "default/quite")
        ]
        ours(found[0], "NOT_FOUND", "ADAPTER_NOT_FOUND")
        assert found[0].message.replace("quiet", "quite") == found[1].message
        push = failure(adapters.Push, push_parts("default/mine", files), token)
        ours(push, "NOT_FOUND", "ADAPTER_NOT_FOUND")
    changes: list[tuple[Any, Any]] = [
        (adapters.Push, push_parts("acme/mine", files)),
        (adapters.Pull, pb.PullRequest(adapter="theirs")),
        (adapters.Delete, pb.DeleteAdapterRequest(adapter="theirs")),
        (adapters.SetAlias, pb.SetAliasRequest(adapter="theirs@x", target="latest")),
        (adapters.DeleteAlias, pb.DeleteAliasRequest(adapter="theirs@latest")),
        (adapters.Protect, pb.ProtectRequest(adapter="theirs")),
        (adapters.Unprotect, pb.UnprotectRequest(adapter="theirs")),
        (adapters.Verify, pb.VerifyRequest(adapter="theirs")),
        (adapters.Residency, pb.ResidencyRequest()),
    ]
    for call, message in changes:
        denied = failure(call, message, "guest")
        ours(denied, "PERMISSION_DENIED", "PERMISSION_DENIED")
        assert denied.metadata == {"right": "admin"}
    ours(failure(adapters.List, pb.ListAdaptersRequest()), "UNAUTHENTICATED", "UNAUTHENTICATED")
    ours(failure(adapters.Push, push_parts("a", files), "x"), "UNAUTHENTICATED", "UNAUTHENTICATED")


def test_what_is_in_use_is_not_deleted(stubs: Stubs, main: Pair, adapter: Callable[..., Path]) -> None:
    with main.client("ops") as client:
        old = client.adapters.push(adapter("held"), "held").version.digest
        found = failure(stubs.adapters.Delete, pb.DeleteAdapterRequest(adapter=f"held@{old}"), "ops")
        ours(found, "FAILED_PRECONDITION", "IN_USE")
        assert "latest" in found.message
        client.adapters.protect(f"held@{old}")
        client.adapters.delete_alias("held@latest")
        found = failure(stubs.adapters.Delete, pb.DeleteAdapterRequest(adapter=f"held@{old}"), "ops")
        ours(found, "FAILED_PRECONDITION", "IN_USE")
        assert "protect" in found.message
        client.adapters.unprotect(f"held@{old}")
        assert client.adapters.delete(f"held@{old}") == old


def test_a_moved_alias_aborts(stubs: Stubs, main: Pair, files: Files) -> None:
    found = push_failure(stubs, files, name="quiet", expected_generation=7)
    ours(found, "ABORTED", "GENERATION_MISMATCH")
    assert "generation" in found.message
    move = pb.SetAliasRequest(adapter="quiet@latest", target="latest", expected_generation=0)
    ours(failure(stubs.adapters.SetAlias, move, "ops"), "ABORTED", "GENERATION_MISMATCH")


def test_damaged_bytes_are_data_loss_until_they_are_pushed_again(
    stubs: Stubs, main: Pair, adapter: Callable[..., Path], cluster: Cluster
) -> None:
    ask = ask_for("rotten")
    with main.client("ops") as client:
        digest = client.adapters.push(adapter("rotten"), "rotten").version.digest
        flip_a_byte(cluster.store / "blobs" / digest.removeprefix("sha256:") / "packed.safetensors")
        found = failure(stubs.inference.Generate, ask, "ops")
        ours(found, "DATA_LOSS", "DATA_LOSS")
        assert digest in found.message or "lora_" in found.message
        assert digest in client.adapters.verify("rotten").damaged
        assert client.adapters.push(adapter("rotten"), "rotten").version.digest == digest
        assert client.generate("The quick", adapter="rotten", max_new_tokens=2).adapter_digest == digest
        client.adapters.delete("rotten")


def flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 0x40
    file.write_bytes(data)


def test_an_adapter_that_overflows_fails_alone(
    stubs: Stubs, main: Pair, files: Files, adapter: Callable[..., Path]
) -> None:
    def explode(weights: Tensors) -> None:
        for name in weights:
            weights[name] *= 1e25

    huge = tensors(explode, files)
    stubs.adapters.Push(push_parts("huge", huge), metadata=bearer("ops"))
    found = failure(stubs.inference.Generate, ask_for("huge"), "ops")
    ours(found, "INTERNAL", "INVALID_LOGITS")
    with main.client("ops") as client:
        client.adapters.delete("huge")
        assert undisturbed(client, [9, 8, 7], 8, adapter="quiet").adapter_digest


def test_a_store_that_is_away_is_unavailable_and_comes_back(
    stubs: Stubs, main: Pair, cluster: Cluster, adapter: Callable[..., Path]
) -> None:
    away = cluster.store.with_name("away")
    ask = ask_for("quiet")
    cluster.store.rename(away)
    try:
        # Until then the scheduler may answer: what it knows of aliases is less than a second old.
        wait_until(lambda: _fails(stubs, ask), "aliases are not answered from memory any more")
        for call, message in [
            (stubs.inference.Generate, ask),
            (stubs.adapters.Get, pb.GetAdapterRequest(adapter="quiet")),
            (stubs.adapters.List, pb.ListAdaptersRequest()),
            (stubs.adapters.Delete, pb.DeleteAdapterRequest(adapter="quiet")),
        ]:
            found = failure(call, message, "ops")
            ours(found, "UNAVAILABLE", "STORE_UNAVAILABLE")
            assert found.retry_s and found.retry_s > 0
        with main.client("ops") as client:  # the base model needs no store
            assert client.generate("The quick", max_new_tokens=2).token_ids
    finally:
        away.rename(cluster.store)
    wait_until(lambda: not _fails(stubs, ask), "the store is found again")
    with main.client("ops") as client:
        assert client.generate([9, 8, 7], adapter="quiet", max_new_tokens=2).token_ids


def _fails(stubs: Stubs, ask: inference_pb2.GenerateRequest) -> bool:
    try:
        stubs.inference.Generate(ask, metadata=bearer("ops"))
    except grpc.RpcError:
        return True
    return False


def test_content_that_executors_cannot_reach_is_unavailable_and_comes_back(
    main: Pair, stubs: Stubs, cluster: Cluster, adapter: Callable[..., Path]
) -> None:
    """The scheduler knows the version; its bytes are away when an executor wants them."""
    blobs, away = cluster.store / "blobs", cluster.store / "away"
    ask = ask_for("cold")
    with main.client("ops") as client:
        digest = client.adapters.push(adapter("cold"), "cold").version.digest
        client.adapters.get("cold")  # and the scheduler remembers it
        blobs.rename(away)
        try:
            found = failure(stubs.inference.Generate, ask, "ops")
        finally:
            away.rename(blobs)
        assert found.code == "UNAVAILABLE" and found.domain == "lorafleet" and found.retry_s
        assert client.generate("The quick", adapter="cold", max_new_tokens=2).adapter_digest == digest
        client.adapters.delete("cold")
