"""A tenant who takes all that it may of what is shared, and one beside it: `make bystander`.

Each way of tests/support/flood/takers.py runs in a process of its own, niced on one core. The other tenant
asks for the same kind of thing, and must get it. tests/faults/test_bystander.py does a little of it.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc

from adapter_store import ModelSpec, open_store
from lorafleet.bench.results import Results, head
from lorafleet.transfer import push_messages
from lorafleet.v1 import adapters_pb2, adapters_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.support.adapters.peft import make_adapter, make_base
from tests.support.adapters.tokenizers import CHAT_TEMPLATE, byte_level, write_folder
from tests.support.flood.http2 import Metadata
from tests.support.flood.run import (
    CALL_S,
    EVERY_S,
    HOSTILE_TOKEN,
    TOKEN,
    Ask,
    Scene,
    Seen,
    ask_for_answer,
    ask_for_tokens,
)
from tests.support.flood.takers import BOMB_TEMPLATE
from tests.support.services.cluster import Cluster

PUSH_EVERY_S = 0.5
SEVERAL_TOKENS = 20  # It has two or three such answers at any time: one seat is not enough.
NOBODY = "nobody"  # What the machine itself does to the bystander.


@dataclass(frozen=True)
class Asks:
    """What the bystander asks for beside one way, and how often."""

    ask: Ask
    every_s: float = EVERY_S


async def ask_for_chat(channel: grpc.aio.Channel, metadata: Metadata) -> None:
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="hello")])
    request = inference_pb2.TokenizeRequest(adapter="plain", chat=chat)
    await inference_pb2_grpc.InferenceStub(channel).Tokenize(request, metadata=metadata, timeout=CALL_S)


def ask_for_push(folder: Path) -> Ask:
    async def ask(channel: grpc.aio.Channel, metadata: Metadata) -> None:
        first = adapters_pb2.PushRequest(header=adapters_pb2.PushHeader(adapter="pushed"))
        parts = push_messages(folder, first, None)
        await adapters_pb2_grpc.AdaptersStub(channel).Push(parts, metadata=metadata, timeout=CALL_S)

    return ask


def asks(adapter: Path) -> dict[str, Asks]:
    """By way; `adapter` is pushed beside "drips"."""
    return {
        NOBODY: Asks(ask_for_answer),
        "bombs": Asks(ask_for_chat),
        "drips": Asks(ask_for_push(adapter), PUSH_EVERY_S),
        "watches": Asks(ask_for_answer),
        "unread": Asks(ask_for_tokens(SEVERAL_TOKENS)),
    }


async def run(cluster: Cluster, adapter: Path, ways: Sequence[str], seconds: float) -> AsyncIterator[Seen]:
    """Each way, one after the other. `adapter` is a PEFT folder of the cluster's model."""
    for tenant, name, template in (("hostile", "bomb", BOMB_TEMPLATE), ("honest", "plain", CHAT_TEMPLATE)):
        (adapter / "chat_template.jinja").write_text(template)
        open_store(str(cluster.store)).put(adapter, tenant, name, ModelSpec.from_folder(cluster.model))
    (adapter / "chat_template.jinja").unlink()
    scene = Scene(cluster)
    await asyncio.to_thread(scene.start)
    for way in ways:
        asking = asks(adapter)[way]
        async with grpc.aio.insecure_channel(scene.address) as channel:
            with suppress(grpc.aio.AioRpcError):  # What begins late has begun then.
                await asking.ask(channel, (("authorization", f"Bearer {TOKEN}"),))
        beside = [] if way == NOBODY else [way]
        yield await scene.flood(beside, "scheduler", seconds, HOSTILE_TOKEN, asking.ask, asking.every_s)


async def _judged(seen: AsyncIterator[Seen], results: Results) -> None:
    """With what must not be; each is told as soon as it is there."""
    async for each in seen:
        results.add({**asdict(each), "faults": each.faults()})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.flood.bystander", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where results go")
    parser.add_argument("--seconds", type=float, default=30, help="of each way")
    parser.add_argument("--ways", nargs="+", choices=asks(Path()))
    args = parser.parse_args()
    results = Results(args.json, head("python -m tests.support.flood.bystander"))
    with tempfile.TemporaryDirectory() as folder:
        model = make_base(Path(folder) / "model", vocab_size=448, max_position_embeddings=4096)
        write_folder(model, byte_level())
        adapter = make_adapter(Path(folder) / "adapter", model, seed=11)
        ways = args.ways or list(asks(adapter))
        with Cluster(model, Path(folder)) as cluster:
            asyncio.run(_judged(run(cluster, adapter, ways, args.seconds), results))
    sys.exit(any(row["faults"] for row in results.rows))


if __name__ == "__main__":
    main()
