"""Bytes that are damaged, or that nobody can reach now."""

from collections.abc import Callable
from pathlib import Path

import grpc

from lorafleet.v1 import adapters_pb2 as pb
from lorafleet.v1 import inference_pb2
from tests.support.adapters.broken import ask_for, ours
from tests.support.services.cluster import Cluster, Pair, wait_until
from tests.support.services.failures import Stubs, bearer, failure


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
