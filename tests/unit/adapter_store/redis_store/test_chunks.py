"""Bytes of any kind and any size, in and out."""

import json
import threading
from pathlib import Path

import pytest
import torch

from adapter_store import AdapterNotFound, DataLoss, ModelSpec, Ref
from adapter_store.files.memory import memory
from adapter_store.redis_store.index import CHUNK_BYTES, Index, StoredFile
from adapter_store.redis_store.keys import Keys
from adapter_store.redis_store.metadata import Metadata
from adapter_store.redis_store.primary import Primary
from adapter_store.redis_store.read import Reader
from adapter_store.redis_store.upload import Sendable, Uploader
from adapter_store.redis_store.url import RedisUrl
from tests.support.adapters.peft import lora_pair, raw_adapter
from tests.support.stores.media import RedisMedium
from tests.support.stores.redis_server import RedisServer

Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        bytes(range(256)),
        "Grüße, 世界".encode(),
        b"\r\n$5\r\nhello\r\n",
        bytes(CHUNK_BYTES),
        bytes(range(256)) * (CHUNK_BYTES // 256) + b"x",
        b"\xff" * (2 * CHUNK_BYTES),
    ],
    ids=["empty", "all bytes", "utf-8", "protocol", "one chunk", "one more byte", "two chunks"],
)
def test_files_come_back_byte_for_byte(redis_server: RedisServer, tmp_path: Path, content: bytes) -> None:
    """No client takes the bytes for text."""
    primary, keys = Primary(RedisUrl.parse(redis_server.url)), Keys("bytes")
    metadata = Metadata(primary, keys)
    (tmp_path / "in").write_bytes(content)
    file = Sendable.of_file(tmp_path / "in")
    files = {"before": file, "file": file, "after": file}
    index = Uploader(primary, keys, metadata).upload("sha256:" + "0" * 64, files)
    stored = index.file("file")
    found = memory(stored.num_bytes)
    Reader(primary, keys, metadata).read(index, stored, found)
    assert found == content
    metadata.abandon(index.claim)
    metadata.sweep()


def big_adapter(folder: Path, megabytes: int) -> Path:
    rank = megabytes * 1_000_000 // (4 * 128)
    return raw_adapter(folder, lora_pair(Q_PROJ, 64, 64, rank=rank), r=rank, lora_alpha=rank)


@pytest.mark.parametrize("megabytes", [20, 600])
def test_big_adapters_come_back_while_small_reads_go_on(
    redis_medium: RedisMedium, adapters: list[Path], spec: ModelSpec, tmp_path: Path, megabytes: int
) -> None:
    """Also beyond the 512 MB that one value of a server may have."""
    store = redis_medium.open()
    small = store.put(adapters[0], "acme", "small", spec)
    folder = big_adapter(tmp_path / "big", megabytes)
    done, reads = threading.Event(), [0]

    def read() -> None:
        reader = redis_medium.open()
        while not done.wait(0.02):
            assert reader.resolve(Ref("acme", "small", alias="latest")) == small
            with reader.open(small.digest) as weights:
                assert len(weights) == 1
            reads[0] += 1

    thread = threading.Thread(target=read)
    thread.start()
    try:
        big = store.put(folder, "acme", "big", spec)
        with store.open(big.digest) as weights:
            pair = lora_pair(Q_PROJ, 64, 64, rank=weights["layers.0.q_proj"].rank)
            stored = torch.from_numpy(weights["layers.0.q_proj"].lora_a.copy())
            assert torch.equal(stored, pair[f"base_model.model.{Q_PROJ}.lora_A.weight"])
    finally:
        done.set()
        thread.join()
    assert reads[0] > 0
    with redis_medium.server.client() as client:
        for key in redis_medium.all_keys():
            if ":{sha256:" in key:
                assert client.strlen(key) <= CHUNK_BYTES
    store.delete(Ref("acme", "big", alias="latest"))
    with pytest.raises(AdapterNotFound):
        store.open(big.digest)
    assert redis_medium.digests() == {small.digest}


def test_chunks_that_are_gone_or_wrong_on_any_connection(
    redis_medium: RedisMedium, spec: ModelSpec, tmp_path: Path
) -> None:
    """A file is read on several: what fails on one ends the others, and the next read is right."""
    store = redis_medium.open()
    version = store.put(big_adapter(tmp_path / "big", 20), "acme", "big", spec)
    claim = redis_medium.index(version.digest).claim
    keys = [redis_medium.keys.chunk(claim.digest, claim.upload, number) for number in (0, 3, 8)]
    with redis_medium.server.client() as client:
        for key in keys:
            whole = client.get(key)
            for value in (None, whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
                client.delete(key) if value is None else client.set(key, value)
                with pytest.raises(DataLoss):
                    store.open(version.digest)
            client.set(key, whole)
            with store.open(version.digest) as weights:
                assert weights.manifest == version.manifest


def test_uploads_of_before_had_chunks_of_another_size() -> None:
    index = Index("sha256:" + "0" * 64, "upload", (StoredFile("file", 3, ("",)),), CHUNK_BYTES)
    assert Index.from_json(index.to_json()) == index
    untold = json.loads(index.to_json())
    del untold["chunk_bytes"]
    assert Index.from_json(json.dumps(untold)).chunk_bytes == 4 << 20
