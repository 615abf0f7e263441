"""What the scheduler's tests share: admitted requests, and a dispatcher over fake executors."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry

from lorafleet.v1 import common_pb2, executor_pb2, inference_pb2
from scheduler.admission.admission import AdmittedRequest, Identity
from scheduler.dispatch.dispatcher import Dispatcher
from scheduler.dispatch.live_request import LiveRequest
from scheduler.dispatch.settings import DispatcherSettings
from scheduler.fleet.endpoint import Endpoint
from scheduler.fleet.link import LinkSettings
from scheduler.metrics import Metrics
from scheduler.text.tokenizer import Tokenizer
from tests.support.adapters.tokenizers import byte_level, write_folder
from tests.support.services.fakes import FakeExecutor, next_token

FINGERPRINT = "sha256:model"
MODULES = frozenset({"q_proj"})
IDENTITY = Identity(tenant="acme", rights=frozenset({"infer", "push", "manage"}), adapters=("acme/*",))
# No executor is taken for hung because this process had no turn for a while.
LINK = LinkSettings(FINGERPRINT, report_timeout_s=60.0, min_backoff_s=0.01, max_backoff_s=0.1)
IMPATIENT = replace(LINK, report_timeout_s=1.5)  # for who is to be taken for hung
SETTINGS = DispatcherSettings(sweep_interval_s=0.02, retry_pause_s=0.05)


def admitted(
    request_id: str = "r1",
    *,
    digest: str = "",
    max_new_tokens: int | None = 8,
    prompt: Sequence[int] = (11, 12, 13),
    resumed: Sequence[int] = (),
    stop: Sequence[str] = (),
    time_limit_ms: int = 0,
    max_rank: int = 8,
    tenant: str = "acme",
    response: inference_pb2.ResponseOptions | None = None,
) -> AdmittedRequest:
    """A request that admission has let in."""
    return AdmittedRequest(
        request_id=request_id,
        identity=replace(IDENTITY, tenant=tenant),
        adapter=f"{tenant}/adapter" if digest else "",
        digest=digest,
        prompt_token_ids=tuple(prompt),
        resumed_token_ids=tuple(resumed),
        sampling=common_pb2.Sampling(seed=5),
        stopping=common_pb2.Stopping(
            max_new_tokens=max_new_tokens, stop_sequences=stop, time_limit_ms=time_limit_ms
        ),
        response=response or inference_pb2.ResponseOptions(),
        priority=0,
        cache_salt=b"salt",
        echo_text="",
        max_rank=max_rank if digest else 0,
        modules=MODULES if digest else frozenset(),
    )


def expected_tokens(request: AdmittedRequest) -> list[int]:
    """What FakeExecutor generates for a request, resumed tokens left out."""
    dispatch = executor_pb2.Dispatch(prompt_token_ids=request.prompt_token_ids, sampling=request.sampling)
    span = range(len(request.resumed_token_ids), request.stopping.max_new_tokens)
    return [next_token(dispatch, index) for index in span]


def tiny_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(folder, byte_level()))


def dispatcher_of(
    addresses: Sequence[str],
    tokenizer: Tokenizer,
    settings: DispatcherSettings = SETTINGS,
    link: LinkSettings = LINK,
    clock: Callable[[], float] | None = None,
    data_loss: Callable[[str, str], None] = lambda adapter, digest: None,
    awake: Callable[[], float] | None = None,
    registry: CollectorRegistry | None = None,
) -> Dispatcher:
    metrics = Metrics(registry or CollectorRegistry())
    clock = clock or asyncio.get_running_loop().time
    dispatcher = Dispatcher(settings, link, tokenizer, metrics, clock, data_loss, awake)
    dispatcher.fleet.settle(map(Endpoint, addresses))
    return dispatcher


@asynccontextmanager
async def running(dispatcher: Dispatcher) -> AsyncIterator[Dispatcher]:
    """Started, and stopped at the end, when nothing may be left anywhere."""
    dispatcher.start()
    try:
        yield dispatcher
        dispatcher.check()
    finally:
        await dispatcher.stop()


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Waits for something that another task brings about."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def ready(dispatcher: Dispatcher, count: int = 1) -> None:
    await until(lambda: sum(state.takes_requests for state in dispatcher.fleet.states) >= count)


async def read_all(live: LiveRequest) -> list[inference_pb2.GenerateChunk]:
    chunks: list[inference_pb2.GenerateChunk] = []
    async with asyncio.timeout(60):
        while chunk := await live.outbox.get():
            chunks.append(chunk)
    return chunks


def tokens_in(chunks: Sequence[inference_pb2.GenerateChunk]) -> list[int]:
    """All tokens; their indexes must join."""
    tokens: list[int] = []
    for chunk in chunks:
        assert not tokens or chunk.output_index == chunks[0].output_index + len(tokens)
        tokens += chunk.token_ids
    return tokens


@asynccontextmanager
async def executors(
    count: int, *, seats: int = 8, step_s: float = 0.005
) -> AsyncIterator[list[FakeExecutor]]:
    """Serving fakes."""
    fakes = [FakeExecutor(FINGERPRINT, seats=seats, step_s=step_s) for _ in range(count)]
    try:
        for fake in fakes:
            await fake.start()
        yield fakes
    finally:
        for fake in fakes:
            await fake.stop()
