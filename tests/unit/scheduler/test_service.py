"""The whole scheduler, started in this process, over real sockets to clients and to fake executors."""

import asyncio
import hashlib
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from adapter_store import ModelSpec, Ref, open_store
from lorafleet.v1 import (
    common_pb2,
    executor_pb2,
    fleet_pb2,
    fleet_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
)
from scheduler.config import Config
from scheduler.fakes import FakeExecutor
from scheduler.service import CannotListen, Scheduler
from scheduler.tokenizer import Tokenizer
from tests.support.scheduling import until
from tests.support.served_model import MAX_MODEL_LEN, write_adapter, write_model

INFERENCE = "lorafleet.v1.Inference"


@dataclass
class House:
    """A running scheduler with one client channel and its fake executor."""

    scheduler: Scheduler
    fake: FakeExecutor
    channel: grpc.aio.Channel

    @property
    def inference(self) -> inference_pb2_grpc.InferenceStub:
        return inference_pb2_grpc.InferenceStub(self.channel)

    @property
    def fleet(self) -> fleet_pb2_grpc.FleetStub:
        return fleet_pb2_grpc.FleetStub(self.channel)

    async def health(self, service: str) -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(Path(tmp_path_factory.mktemp("served")) / "base")


@pytest.fixture(scope="module")
def digest(model: Path) -> str:
    """Version of default/alice, in the store beside the model."""
    store = open_store(str(model.parent / "store"))
    source = write_adapter(model.parent / "alice")
    return store.put(source, "default", "alice", ModelSpec.from_folder(model)).digest


@pytest.fixture
def opened(model: Path) -> Callable[[Config | None], AbstractAsyncContextManager[House]]:
    @asynccontextmanager
    async def open_house(changes: dict[str, object] | None = None) -> AsyncIterator[House]:
        fake = FakeExecutor(ModelSpec.from_folder(model).fingerprint)
        await fake.start()
        config = Config(
            model=model,
            store=str(model.parent / "store"),
            executor=(fake.address,),
            listen="127.0.0.1:0",
            metrics_port=-1,
        )
        scheduler = Scheduler(replace(config, **(changes or {})))
        await scheduler.start()
        try:
            async with grpc.aio.insecure_channel(scheduler.address) as channel:
                await until(lambda: scheduler.dispatcher.fleet.any_ready)
                yield House(scheduler, fake, channel)
                scheduler.dispatcher.check()
        finally:
            await scheduler.stop()
            await fake.stop()

    return open_house


@pytest.fixture
async def house(opened: Callable[..., AbstractAsyncContextManager[House]]) -> AsyncIterator[House]:
    async with opened() as house:
        yield house


def generate(
    text: str = "The quick", *, max_new_tokens: int = 12, **fields: object
) -> inference_pb2.GenerateRequest:
    stopping = common_pb2.Stopping(max_new_tokens=max_new_tokens)
    return inference_pb2.GenerateRequest(text=text, stopping=stopping, **fields)


async def read(stream: AsyncIterator[inference_pb2.GenerateChunk]) -> list[inference_pb2.GenerateChunk]:
    return [chunk async for chunk in stream]


async def fails(call: object) -> tuple[grpc.StatusCode, str, str]:
    """Code, reason and message of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    status = rpc_status.from_call(caught.value)
    info = error_details_pb2.ErrorInfo()
    assert status is not None and status.details[0].Unpack(info)
    return caught.value.code(), info.reason, caught.value.details() or ""


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
    """C55: alone and beside others."""
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
    """C44."""
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
    opened: Callable[..., AbstractAsyncContextManager[House]],
) -> None:
    async with opened({"stream_buffer": 4, "slow_client_timeout": 0.2}) as house:
        house.fake.step_s = 0.001

        def pad(step: executor_pb2.StepTokens) -> None:
            for dispatch_id in step.dispatch_ids:  # Fills the connection's window.
                entry = step.logprobs.add(dispatch_id=dispatch_id)
                top = [common_pb2.TokenLogprob(token_id=1 << 30, logprob=-1)] * 2000
                entry.positions.add(top=top)

        house.fake.edit_step = pad
        response = inference_pb2.ResponseOptions(logprobs=20)
        stream = house.inference.GenerateStream(generate(max_new_tokens=480, response=response))
        await stream.read()
        await until(lambda: not house.scheduler.dispatcher.num_live and not house.fake.running)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await stream.read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() is grpc.StatusCode.CANCELLED


async def test_health_follows_the_executors(house: House) -> None:
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING

    async def becomes(status: int) -> None:
        async with asyncio.timeout(60):
            while await house.health(INFERENCE) != status:
                await asyncio.sleep(0.02)

    await becomes(serving)
    house.fake.load_state = executor_pb2.LOAD_STATE_DRAINING
    await becomes(not_serving)
    assert await house.health("") == serving
    house.fake.load_state = executor_pb2.LOAD_STATE_READY
    await becomes(serving)


async def test_reflection_lists_the_services(house: House) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(house.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    [answer] = [a async for a in stub.ServerReflectionInfo(iter([request]))]
    names = {service.name for service in answer.list_services_response.service}
    assert {INFERENCE, "lorafleet.v1.Adapters", "lorafleet.v1.Fleet", "grpc.health.v1.Health"} <= names


async def test_draining_refuses_new_and_ends_old(house: House) -> None:
    """C48."""
    house.fake.step_s = 0.02
    stream = house.inference.GenerateStream(generate(max_new_tokens=30))
    reading = asyncio.create_task(read(stream))
    await until(lambda: house.scheduler.dispatcher.num_live == 1)
    drained = asyncio.create_task(house.scheduler.drain())
    await until(lambda: house.scheduler.dispatcher.draining)
    code, reason, _ = await fails(house.inference.Generate(generate()))
    assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert await house.health(INFERENCE) == health_pb2.HealthCheckResponse.NOT_SERVING
    assert (await reading)[-1].usage.completion_tokens == 30
    assert await drained


async def test_watch_cordon_and_drain_an_executor(house: House) -> None:
    watch = house.fleet.Watch(fleet_pb2.WatchFleetRequest(interval_ms=10))
    snapshot = await watch.read()
    assert [(e.address, e.state, e.max_loras) for e in snapshot.executors] == [
        (house.fake.address, fleet_pb2.EXECUTOR_STATE_READY, 4)
    ]
    house.fake.step_s = 0.01
    running = asyncio.ensure_future(house.inference.Generate(generate(max_new_tokens=30)))
    await until(lambda: bool(house.fake.running))
    drained = await house.fleet.Drain(fleet_pb2.DrainExecutorRequest(address=house.fake.address))
    assert (drained.executor.cordoned, drained.executor.running) == (True, 0)
    assert (await running).usage.completion_tokens == 30
    waiting = asyncio.ensure_future(house.inference.Generate(generate()))
    await until(lambda: len(house.scheduler.dispatcher.queue) == 1)
    while not (await watch.read()).waiting:
        pass
    await house.fleet.Cordon(fleet_pb2.CordonRequest(address=house.fake.address, cordoned=False))
    assert (await waiting).usage.completion_tokens == 12
    code, _, message = await fails(house.fleet.Cordon(fleet_pb2.CordonRequest(address="nowhere:1")))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert house.fake.address in message
    watch.cancel()


async def test_tokens_tell_callers_apart(
    opened: Callable[..., AbstractAsyncContextManager[House]], tmp_path: Path, digest: str
) -> None:
    tokens = tmp_path / "tokens.toml"
    hashed = hashlib.sha256(b"secret").hexdigest()
    tokens.write_text(f'[[tokens]]\nsha256 = "{hashed}"\ntenant = "acme"\nrights = ["infer"]\n')
    async with opened({"tokens_file": tokens}) as house:
        code, _, _ = await fails(house.inference.Generate(generate()))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        bearer = (("authorization", "Bearer secret"),)
        assert (await house.inference.Generate(generate(), metadata=bearer)).usage.completion_tokens == 12
        hidden = generate(adapter="default/alice")
        code, _, _ = await fails(house.inference.Generate(hidden, metadata=bearer))
        assert code is grpc.StatusCode.NOT_FOUND
        watch = house.fleet.Watch(fleet_pb2.WatchFleetRequest(), metadata=bearer)
        code, _, _ = await fails(watch)
        assert code is grpc.StatusCode.PERMISSION_DENIED


async def test_metrics_over_http(
    opened: Callable[..., AbstractAsyncContextManager[House]], digest: str
) -> None:
    async with opened({"metrics_port": 0}) as house:
        answer = await house.inference.Generate(generate(adapter="alice"))
        await fails(house.inference.Generate(generate(adapter="junk-name")))
        url = f"http://127.0.0.1:{house.scheduler.metrics_port}/metrics"
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=60).read().decode())
    assert 'lorafleet_scheduler_requests_total{code="OK"} 1.0' in page
    assert 'lorafleet_scheduler_requests_total{code="NOT_FOUND"} 1.0' in page
    labels = 'adapter="default/alice",kind="generated",tenant="default"'
    assert f"lorafleet_scheduler_tokens_total{{{labels}}} 12.0" in page
    assert f"lorafleet_scheduler_request_prompt_tokens_sum {answer.usage.prompt_tokens}.0" in page
    assert "lorafleet_scheduler_request_generated_tokens_sum 12.0" in page
    assert "lorafleet_scheduler_request_seconds_count 1.0" in page
    assert "junk-name" not in page and "_created" not in page


async def test_a_port_in_use_is_told(house: House) -> None:
    second = Scheduler(replace(house.scheduler.config, listen=house.scheduler.address))
    with pytest.raises(CannotListen, match=house.scheduler.address):
        await second.start()
    await second.stop()
