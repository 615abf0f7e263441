"""One store and one tiny model for all tests of this folder, and the fleets over them, each started once."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.adapters.peft import DENSE, TABLES, load_base, make_adapter, make_base
from tests.support.adapters.tokenizers import CHAT_TEMPLATE, byte_level, write_folder
from tests.support.services.cluster import Cluster, Pair
from tests.support.services.failures import Stubs, raw_stubs
from tests.support.services.streams import Witness, witness

MAX_MODEL_LEN = 4096
# What callers of the "main" fleet send as bearer token: tenant, rights, what they see.
CALLERS: Mapping[str, tuple[str, Sequence[str], Sequence[str]]] = {
    "ops": ("default", ("infer", "push", "manage", "operate"), ("*/*",)),
    "acme": ("acme", ("infer", "push", "manage"), ("acme/*",)),
    "guest": ("acme", (), ("acme/*",)),
}


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    model = make_base(folder / "model", vocab_size=448, std=0.15, max_position_embeddings=MAX_MODEL_LEN)
    write_folder(model, byte_level(), chat_template=CHAT_TEMPLATE)
    with Cluster(model, folder) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def adapter(cluster: Cluster) -> Callable[..., Path]:
    """The folder of a loud adapter; the fields are make_adapter's. Made once for each name."""
    base = load_base(cluster.model)

    def make(name: str, **fields: Any) -> Path:
        folder = cluster.folder / "adapters" / name
        if not folder.exists():
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])
            make_adapter(folder, base, **{"seed": seed, "targets": DENSE, **fields})
        return folder

    return make


@pytest.fixture(scope="session")
def main(cluster: Cluster) -> Pair:
    """4 slots of rank 16 for the dense projections, kept by who has them; steps of up to 4096 tokens; callers
    are told apart."""
    file = cluster.folder / "tokens.toml"
    file.write_text("".join(token_entry(token, *caller) for token, caller in CALLERS.items()))
    slots = ("--max-loras", "4", "--max-lora-rank", "16", "--max-seats", "32")
    steps = ("--max-batched-tokens", "4096", "--num-kv-blocks", "1024", "--host-memory-bytes", "4000000")
    executor = (*slots, *steps, "--adapter-aging", "60")
    return cluster.pair(
        "main", executor, ("--tokens-file", str(file), "--aging", "60", "--delete-grace", "0")
    )


@pytest.fixture(scope="session")
def wide(cluster: Cluster) -> Pair:
    """12 slots of rank 64 that hold embed_tokens and lm_head, too."""
    slots = ("--max-loras", "12", "--max-lora-rank", "64", "--lora-modules", ",".join((*DENSE, *TABLES)))
    return cluster.pair("wide", (*slots, "--max-batched-tokens", "1024"))


@pytest.fixture(scope="session")
def two(cluster: Cluster) -> Pair:
    """2 slots, 4 seats, and KV blocks for 384 tokens in all."""
    room = ("--max-seats", "4", "--num-kv-blocks", "24", "--block-size", "16")
    return cluster.pair("two", ("--max-loras", "2", "--max-lora-rank", "16", *room))


@pytest.fixture(scope="session")
def one(cluster: Cluster) -> Pair:
    """1 slot, 4 seats; 40 requests may wait, and a cold adapter waits for 0.2 s at most for its turn."""
    slots = ("--max-loras", "1", "--max-lora-rank", "16", "--max-seats", "4", "--adapter-aging", "0.2")
    return cluster.pair("one", slots, ("--max-queued", "40", "--aging", "0.2"))


@pytest.fixture(scope="module")
def watched(main: Pair, adapter: Callable[..., Path]) -> Iterator[Witness]:
    """A stream beside what a module's tests do wrong."""
    with main.client("ops") as client:
        client.adapters.push(adapter("quiet"), "quiet")
        client.adapters.push(adapter("theirs"), "acme/theirs")
    with witness(main, [5, 60, 70, 81] * 5, "quiet", 600, token="ops") as watched:
        yield watched


@pytest.fixture(scope="module")
def stubs(main: Pair) -> Iterator[Stubs]:
    with raw_stubs(main.scheduler.address) as stubs:
        yield stubs


def token_entry(token: str, tenant: str, rights: Sequence[str], adapters: Sequence[str]) -> str:
    sha256 = hashlib.sha256(token.encode()).hexdigest()
    lists = f"rights = {list(rights)}\nadapters = {list(adapters)}\n"
    return f'[[tokens]]\nsha256 = "{sha256}"\ntenant = "{tenant}"\n{lists}'
