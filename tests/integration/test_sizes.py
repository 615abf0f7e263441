"""Big messages work, or are refused clearly, and the channel stays usable."""

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from adapter_store import ModelSpec
from lorafleet import IncompatibleAdapter, InvalidRequest
from lorafleet.v1 import executor_pb2, inference_pb2
from scheduler.fleet.endpoint import Endpoint
from scheduler.fleet.link import MAX_BATCH_BYTES, ExecutorLink, LinkSettings
from scheduler.fleet.wire import Tokens
from tests.support.services.cluster import Cluster, Pair
from tests.support.services.failures import Stubs, bearer, failure, raw_stubs
from tests.support.services.scheduling import until

MIB = 1 << 20


@pytest.fixture
def stubs(main: Pair) -> Iterator[Stubs]:
    with raw_stubs(main.scheduler.address) as stubs:
        yield stubs


@pytest.mark.parametrize("size", [4 * MIB - 1, 4 * MIB + 1, 6 * 10**6, 15 * MIB])
def test_prompts_beyond_the_model_are_refused_by_us(stubs: Stubs, size: int) -> None:
    """Not by gRPC's default of 4 MiB: the limit is 16 MiB on every side."""
    requests = {
        "text": inference_pb2.GenerateRequest(text="x" * size),
        "ids": inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[7] * size)),
    }
    for request in requests.values():
        found = failure(stubs.inference.Generate, request, "ops")
        assert (found.code, found.fields) == ("INVALID_ARGUMENT", ("prompt",))
        assert str(size) in found.message and "4096" in found.message


def test_messages_beyond_the_limit_are_refused_by_the_transport(stubs: Stubs) -> None:
    for size in (16 * MIB + 1, 64 * MIB):
        found = failure(stubs.inference.Generate, inference_pb2.GenerateRequest(text="x" * size), "ops")
        assert found.code == "RESOURCE_EXHAUSTED" and "16777216" in found.message
    small = inference_pb2.GenerateRequest(text="still here")
    small.stopping.max_new_tokens = 1
    assert stubs.inference.Generate(small, metadata=bearer("ops")).token_ids


def test_a_long_prompt_with_all_its_scores(main: Pair) -> None:
    with main.client("ops") as client:
        answer = client.generate([7, 8, 9, 10] * 1000, max_new_tokens=1, prompt_logprobs=20)
    assert len(answer.prompt_logprobs) == 4000
    assert all(len(position.top) == 20 for position in answer.prompt_logprobs[1:])


def test_the_longest_name_of_a_base_is_told_and_a_warning_quotes_it_in_short(
    main: Pair, adapter: Callable[..., Path], tmp_path: Path
) -> None:
    """What cannot be printed takes ten characters for one in a warning."""
    shutil.copytree(adapter("wordy"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    longest = "\U000e0001" * 4096

    def named(base: str) -> Path:
        text = json.dumps(config | {"base_model_name_or_path": base}, ensure_ascii=False)
        (tmp_path / "adapter_config.json").write_text(text)
        return tmp_path

    with main.client("ops") as client:
        with pytest.raises(InvalidRequest, match="base_model_name_or_path has 4097 characters"):
            client.adapters.push(named(longest + "x"), "wordy")
        version = client.adapters.push(named(longest), "wordy").version
        assert version.base_model == longest
        assert [len(warning.message) < 1100 for warning in version.warnings] == [True]
        assert version in client.adapters.list()
        client.adapters.delete("wordy")


class Heard:
    """What an executor tells a scheduler about its dispatches."""

    def __init__(self) -> None:
        self.tokens: list[Tokens] = []
        self.rejected: dict[str, executor_pb2.Rejected] = {}
        self.lost: list[str] = []

    def on_tokens(self, address: str, step: Sequence[Tokens]) -> None:
        self.tokens += step

    def on_rejected(self, address: str, rejected: executor_pb2.Rejected) -> None:
        self.rejected[rejected.dispatch_id] = rejected

    def on_lost(self, address: str, dispatch_ids: list[str], why: str, *, crashed: bool) -> None:
        self.lost.append(why)

    def on_finished(self, finished: executor_pb2.Finished) -> None:
        """Tokens tell enough."""

    def on_room(self) -> None:
        """Nothing waits for it."""

    def on_phase(self) -> None:
        """Nor for this."""


async def test_a_scheduler_and_an_executor_exchange_messages_beyond_grpcs_default(
    main: Pair, cluster: Cluster
) -> None:
    """One batch, of prompts that the model does not take; then one step, with more log-probabilities for each
    token than clients may ask for."""
    heard = Heard()
    settings = LinkSettings(ModelSpec.from_folder(cluster.model).fingerprint, report_timeout_s=60.0)
    link = ExecutorLink(Endpoint(main.executor.address), settings, heard, time.monotonic)
    running = asyncio.create_task(link.run())
    await until(lambda: link.state.takes_requests)
    batch = [dispatch(f"long{n}", [300] * 1_200_000) for n in range(3)]
    assert 4 * MIB < sum(each.ByteSize() for each in batch) < MAX_BATCH_BYTES
    send(link, batch)
    await until(lambda: len(heard.rejected) == 3 or bool(heard.lost))
    assert not heard.lost
    assert {rejected.reason for rejected in heard.rejected.values()} == {"INVALID_REQUEST"}
    send(link, [dispatch("scored", [7, 8, 9, 10] * 250, prompt_logprobs=440)])
    await until(lambda: bool(heard.tokens or heard.lost))
    assert not heard.lost
    [tokens] = heard.tokens
    assert sum(position.ByteSize() for position in tokens.prompt_logprobs) > 4 * MIB
    running.cancel()


def send(link: ExecutorLink, batch: list[executor_pb2.Dispatch]) -> None:
    for each in batch:
        link.state.sent(each.dispatch_id, each.digest)
    link.dispatch(batch)


def dispatch(name: str, prompt: list[int], **fields: Any) -> executor_pb2.Dispatch:
    made = executor_pb2.Dispatch(dispatch_id=name, prompt_token_ids=prompt, **fields)
    made.stopping.max_new_tokens = 1
    return made


def test_adapters_of_any_size_go_up_and_down(
    main: Pair, adapter: Callable[..., Path], tmp_path: Path
) -> None:
    folder = adapter("big", rank=3000, std=0.01)
    weights = (folder / "adapter_model.safetensors").read_bytes()
    assert len(weights) > 16 * MIB
    told: list[tuple[int, int]] = []
    with main.client("ops") as client:
        pushed = client.adapters.push(folder, "big", on_progress=lambda *progress: told.append(progress))
        assert pushed.version.max_rank == 3000
        assert told[-1][0] == told[-1][1] > len(weights)
        pulled = client.adapters.pull("big", tmp_path / "pulled")
        assert (pulled / "adapter_model.safetensors").read_bytes() == weights
        with pytest.raises(IncompatibleAdapter, match="3000"):
            client.generate("a", adapter="big")
        assert client.generate("a", max_new_tokens=1).token_ids
        client.adapters.delete("big")
