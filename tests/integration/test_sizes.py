"""Big messages: they work, or are refused clearly, and the channel stays usable."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lorafleet import IncompatibleAdapter
from lorafleet.v1 import inference_pb2
from tests.support.cluster import Pair
from tests.support.failures import Stubs, bearer, failure, raw_stubs

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
