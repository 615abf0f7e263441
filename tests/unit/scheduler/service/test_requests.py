"""Requests through a whole scheduler, over real sockets to a client and to a fake executor."""

import asyncio
from pathlib import Path

import grpc
import pytest

from adapter_store import ModelSpec, Ref, open_store
from lorafleet import AsyncClient
from lorafleet.calls import CHANNEL_OPTIONS
from lorafleet.v1 import (
    common_pb2,
    executor_pb2,
    inference_pb2,
    inference_pb2_grpc,
)
from scheduler.text.tokenizer import Tokenizer
from tests.support.adapters.served_model import MAX_MODEL_LEN
from tests.support.services.scheduler_house import House, fails, generate, open_house, pad
from tests.support.services.scheduling import until


async def test_a_stream_and_a_whole_answer_agree(house: House, digest: str) -> None:
    request = generate(adapter="alice", request_id="mine", sampling=common_pb2.Sampling(seed=3))
    chunks = [chunk async for chunk in house.inference.GenerateStream(request)]
    first, last = chunks[0], chunks[-1]
    assert (first.request_id, first.adapter_digest, first.seed) == ("mine", digest, 3)
    assert not any(chunk.request_id or chunk.seed for chunk in chunks[1:])
    assert not any(chunk.finish_reason or chunk.HasField("usage") for chunk in chunks[:-1])
    assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert last.usage.completion_tokens == 12
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    answer = await house.inference.Generate(request)
    assert list(answer.token_ids) == tokens
    assert answer.text == "".join(chunk.text for chunk in chunks)
    assert (answer.usage, answer.finish_reason) == (last.usage, last.finish_reason)
    assert house.fake.dispatches[0].digest == digest


async def test_acceptance_is_told_before_the_first_token(house: House) -> None:
    """So that a client knows what to ask for again when this server dies now."""
    house.fake.frozen = True
    call = house.inference.GenerateStream(generate())
    async with asyncio.timeout(10):
        assert ("lorafleet-accepted", "true") in tuple(await call.initial_metadata())
    call.cancel()
    refused = house.inference.GenerateStream(generate(adapter="nobody"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(refused))
    assert "lorafleet-accepted" not in dict(caught.value.initial_metadata())


async def test_echo_begins_the_text(house: House) -> None:
    request = generate("The quick", response=inference_pb2.ResponseOptions(echo=True))
    assert (await house.inference.Generate(request)).text.startswith("The quick")
    chunks = [chunk async for chunk in house.inference.GenerateStream(request)]
    assert chunks[0].text.startswith("The quick")


async def test_resuming_continues_the_very_stream(house: House, digest: str) -> None:
    request = generate(adapter="alice", sampling=common_pb2.Sampling(temperature=1))
    whole = [chunk async for chunk in house.inference.GenerateStream(request)]
    cut = whole[: len(whole) // 2]
    tokens = [token for chunk in cut for token in chunk.token_ids]
    request.resume.adapter_digest = cut[0].adapter_digest
    request.resume.seed = cut[0].seed
    request.resume.output_token_ids.extend(tokens)
    rest = [chunk async for chunk in house.inference.GenerateStream(request)]
    assert rest[0].output_index == len(tokens)
    again = tokens + [token for chunk in rest for token in chunk.token_ids]
    assert again == [token for chunk in whole for token in chunk.token_ids]
    assert "".join(chunk.text for chunk in cut + rest) == "".join(chunk.text for chunk in whole)
    assert rest[-1].usage.completion_tokens == 12


async def test_tokenize_and_list_models(house: House, digest: str, model: Path) -> None:
    tokens = await house.inference.Tokenize(inference_pb2.TokenizeRequest(text="The fox"))
    tokenizer = Tokenizer.from_folder(model)
    assert list(tokens.token_ids) == tokenizer.encode("The fox")
    assert len(tokens.tokens) == len(tokens.token_ids)
    assert tokens.max_model_len == MAX_MODEL_LEN
    models = await house.inference.ListModels(inference_pb2.ListModelsRequest())
    assert [(m.adapter, m.digest, m.max_rank) for m in models.models] == [
        ("", "", 0),
        ("default/alice@latest", digest, 4),
    ]
    assert (models.base_model, models.next_page_token) == ("base", "")
    first = await house.inference.ListModels(inference_pb2.ListModelsRequest(page_size=1))
    assert [m.adapter for m in first.models] == [""]
    second = await house.inference.ListModels(
        inference_pb2.ListModelsRequest(page_size=1, page_token=first.next_page_token)
    )
    assert [m.adapter for m in second.models] == ["default/alice@latest"]
    assert not second.next_page_token


@pytest.mark.parametrize("name", ["alicia", "Alice", "other/alice", "alice@old", " alice", "alice ", "gone"])
async def test_an_unknown_adapter_is_never_the_base(
    house: House, model: Path, digest: str, name: str
) -> None:
    """Nor does it disturb the request beside it."""
    if name == "gone":
        store = open_store(house.scheduler.config.store)
        store.put(model.parent / "alice", "default", name, ModelSpec.from_folder(model))
        store.withdraw(Ref("default", name, alias="latest"))
    good = house.inference.Generate(generate())
    code, _, _ = await fails(house.inference.Generate(generate(adapter=name)))
    assert code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT)
    assert (await good).usage.completion_tokens == 12
    assert [dispatch.digest for dispatch in house.fake.dispatches] == [""]


async def test_failures_reach_the_client_as_they_are(house: House, digest: str) -> None:
    house.fake.hello.max_rank = 2
    house.fake.extra_events = [executor_pb2.ExecutorEvent(residency=executor_pb2.ResidencyDelta(number=9))]
    limits = house.scheduler.dispatcher.fleet.states[0]
    await until(lambda: limits.limits is not None and limits.limits.max_rank == 2)
    code, reason, message = await fails(house.inference.GenerateStream(generate(adapter="alice")))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "INCOMPATIBLE_ADAPTER")
    assert "rank 4" in message
    await until(lambda: house.scheduler.dispatcher.fleet.any_ready)
    house.fake.reject = lambda _: executor_pb2.Rejected(reason="DATA_LOSS", message="bad bytes", code=15)
    code, reason, message = await fails(house.inference.Generate(generate()))
    assert (code, reason, message) == (grpc.StatusCode.DATA_LOSS, "DATA_LOSS", "bad bytes")


async def test_a_second_call_with_the_name_aborts_the_first(house: House) -> None:
    house.fake.frozen = True
    first = house.inference.GenerateStream(generate(request_id="same"))
    reading = asyncio.create_task(fails(first))
    await until(lambda: bool(house.fake.running))
    second = asyncio.ensure_future(house.inference.Generate(generate(request_id="same")))
    code, reason, _ = await reading
    assert (code, reason) == (grpc.StatusCode.ABORTED, "SUPERSEDED")
    house.fake.frozen = False
    assert (await second).usage.completion_tokens == 12


async def test_deadline_cancel_and_dead_clients_free_everything(house: House) -> None:
    dispatcher = house.scheduler.dispatcher
    house.fake.frozen = True
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await house.inference.Generate(generate(), timeout=0.1)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: not house.fake.running and not dispatcher.num_live)
    house.fake.frozen = False
    stream = house.inference.GenerateStream(generate(max_new_tokens=400))
    async for chunk in stream:
        if chunk.output_index >= 3:
            stream.cancel()
            break
    await until(lambda: not house.fake.running and not dispatcher.num_live)
    async with grpc.aio.insecure_channel(house.scheduler.address) as dying:
        stub = inference_pb2_grpc.InferenceStub(dying)
        streams = [stub.GenerateStream(generate(max_new_tokens=400)) for _ in range(8)]
        await asyncio.gather(*(stream.read() for stream in streams))
        assert dispatcher.num_live == 8
    await until(lambda: not house.fake.running and not dispatcher.num_live)


async def test_many_quick_cancels_leave_nothing(house: House) -> None:
    house.fake.step_s = 0.02
    for _ in range(20):
        calls = [house.inference.GenerateStream(generate(max_new_tokens=400)) for _ in range(20)]
        await asyncio.sleep(0.005)
        for call in calls:
            call.cancel()
    dispatcher = house.scheduler.dispatcher
    await until(lambda: not dispatcher.num_live and not house.fake.running)
    assert len(dispatcher.queue) == 0


async def test_a_client_that_stops_reading_is_cut_off(
    model: Path,
) -> None:
    async with open_house(model, slow_client_timeout=0.2) as house:
        house.fake.step_s = 0.001

        house.fake.edit_step = lambda step: pad(step, 26_000)  # Fills the connection's window.
        response = inference_pb2.ResponseOptions(logprobs=20)
        stream = house.inference.GenerateStream(generate(max_new_tokens=480, response=response))
        await stream.read()
        await until(lambda: not house.scheduler.dispatcher.num_live and not house.fake.running)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await stream.read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() is grpc.StatusCode.CANCELLED


async def test_answers_and_events_beyond_what_grpc_takes_by_default(house: House) -> None:
    """From the executor, and to the client, in pieces and whole."""
    house.fake.edit_step = lambda step: pad(step, 4_500_000)
    scores = inference_pb2.ResponseOptions(logprobs=20)
    async with AsyncClient(house.scheduler.address) as client:
        answer = await client.generate("The quick", max_new_tokens=2, logprobs=20)
    async with grpc.aio.insecure_channel(house.scheduler.address, options=CHANNEL_OPTIONS) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        whole = await stub.Generate(generate(max_new_tokens=2, response=scores))
    assert whole.ByteSize() > 9_000_000
    assert [len(p.top) for p in answer.logprobs] == [len(p.top) for p in whole.logprobs]


async def test_an_event_beyond_the_limit_fails_its_request_clearly_and_nothing_else(house: House) -> None:
    """It ends the executor's stream, at each attempt anew: as a request does that crashes executors."""
    house.fake.edit_step = lambda step: pad(step, 17_000_000)
    code, reason, _ = await fails(house.inference.Generate(generate(max_new_tokens=1)))
    assert (code, reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    house.fake.edit_step = lambda step: None
    assert (await house.inference.Generate(generate())).usage.completion_tokens == 12
