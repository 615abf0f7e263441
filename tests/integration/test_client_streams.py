"""Both clients against a real server that breaks streams wherever the test wants."""

import asyncio
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorafleet import (
    Aborted,
    AsyncClient,
    Cancelled,
    Client,
    DeadlineExceeded,
    FinishReason,
    Generation,
    InternalError,
    Unavailable,
)
from lorafleet.ports import free_port
from lorafleet.v1 import inference_pb2, inference_pb2_grpc
from tests.support.services.cluster import wait_until
from tests.support.services.dropping_proxy import (
    DroppingProxy,
    accepted,
    http_status,
    message,
    no_trailers,
    reset,
)
from tests.support.services.proxy import Proxy
from tests.support.services.scripted_server import (
    DIGEST,
    SEED,
    ScriptedInference,
    ServerThread,
    script,
    serving,
)

PIECES = ["Zwölf", " ", "Bo", "", "xkämpfer", " 🥊", " jagen", "", " Viktor", "."]
TEXT = "".join(PIECES)
TOKENS = tuple(range(100, 100 + len(PIECES)))


@pytest.fixture(scope="module")
def inference() -> ScriptedInference:
    return ScriptedInference()


@pytest.fixture(scope="module")
def target(inference: ScriptedInference) -> Iterator[str]:
    with serving(
        lambda server: inference_pb2_grpc.add_InferenceServicer_to_server(inference, server)
    ) as address:
        yield address


def generate(kind: str, target: str, prompt: str, **options: object) -> Generation:
    if kind == "sync":
        with Client(target) as client:
            return client.generate(prompt, **options)

    async def run() -> Generation:
        async with AsyncClient(target) as client:
            return await client.generate(prompt, **options)

    return asyncio.run(run())


both = pytest.mark.parametrize("kind", ["sync", "asyncio"])


@both
@pytest.mark.parametrize("chunks", range(len(PIECES) + 2))
def test_a_break_after_any_chunk_loses_and_repeats_nothing(
    kind: str, chunks: int, target: str, inference: ScriptedInference
) -> None:
    """chunks = 0: before the first; 1: after the header; the last: after the finish reason."""
    answer = generate(kind, target, script(PIECES, [chunks]), adapter="a", echo=True)
    assert (answer.text, answer.token_ids) == ("prompt:" + TEXT, TOKENS)
    assert (answer.adapter_digest, answer.seed) == (DIGEST, SEED)
    assert answer.finish_reason is FinishReason.STOP
    assert answer.usage.completion_tokens == len(PIECES)
    attempts = inference.requests[answer.request_id]
    assert len(attempts) == (1 if chunks == len(PIECES) + 1 else 2)
    assert [request.HasField("resume") for request in attempts[1:]] == [chunks > 0] * (len(attempts) - 1)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    breaks=st.lists(st.integers(0, 6), max_size=5),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    adapter=st.sampled_from([None, "a"]),
)
@both
def test_breaks_anywhere_any_number_of_times(
    kind: str, target: str, breaks: list[int], sizes: list[int], adapter: str | None
) -> None:
    breaks = breaks if breaks.count(0) < 4 else []
    answer = generate(kind, target, script(PIECES, breaks, sizes), adapter=adapter, max_new_tokens=64)
    assert (answer.text, answer.token_ids) == (TEXT, TOKENS)


@both
@pytest.mark.parametrize(("accept", "chunks"), [(True, 0), (False, 0), (False, 1)])
def test_who_asks_again_for_what_was_accepted_says_so(
    kind: str, accept: bool, chunks: int, target: str, inference: ScriptedInference
) -> None:
    """Before the first chunk the request itself does not show it."""
    answer = generate(kind, target, script(PIECES, [chunks], accept=accept))
    assert inference.again[answer.request_id] == [False, accept or chunks > 0]


def test_resumed_requests_are_otherwise_unchanged(target: str, inference: ScriptedInference) -> None:
    options = {"max_new_tokens": 20, "temperature": 0.5, "stop": "zzz", "session_id": "s"}
    answer = generate("sync", target, script(PIECES, [3, 2]), adapter="a@b", **options)
    first, *others = inference.requests[answer.request_id]
    assert len(others) == 2
    for request in others:
        request.ClearField("resume")
        assert request == first


def test_other_errors_are_final(target: str, inference: ScriptedInference) -> None:
    with pytest.raises(Aborted, match="as scripted"):
        generate("sync", target, script(PIECES, [2], code="ABORTED"), request_id="aborted")
    assert len(inference.requests["aborted"]) == 1


def test_a_request_that_never_starts_is_given_up(target: str, inference: ScriptedInference) -> None:
    with pytest.raises(Unavailable):
        generate("sync", target, script(PIECES, [0] * 100), request_id="never")
    assert len(inference.requests["never"]) == 4


def test_an_answer_that_makes_no_progress_is_given_up(target: str) -> None:
    with Client(target, resume_timeout=0.5) as client, pytest.raises(Unavailable, match="as scripted"):
        client.generate(script(PIECES, [3] + [1] * 100))


def test_going_on_with_another_version_is_refused(target: str) -> None:
    with pytest.raises(InternalError, match="went on with sha256:other"):
        generate("sync", target, script(PIECES, [3], resume_digest="sha256:other"), adapter="a")


@both
def test_the_deadline_is_for_the_whole_call(kind: str, target: str) -> None:
    with pytest.raises(DeadlineExceeded):
        generate(kind, target, script(PIECES, [4, 4], hang=True), timeout=0.3)


def test_closing_a_stream_cancels_the_call(target: str, inference: ScriptedInference) -> None:
    with Client(target) as client:
        stream = client.stream(script(PIECES, [2], hang=True), request_id="closed")
        assert next(stream).text == ""
        assert next(stream).token_ids == (100,)
        stream.close()
        wait_until(lambda: "closed" in inference.cancelled, "it is cancelled")


async def test_closing_an_asyncio_stream_cancels_the_call(target: str, inference: ScriptedInference) -> None:
    async with AsyncClient(target) as client:
        stream = client.stream(script(PIECES, [2], hang=True), request_id="aclosed")
        assert (await anext(stream)).text == ""
        assert (await anext(stream)).token_ids == (100,)  # so that the server has come to where it hangs
        await stream.aclose()
        await asyncio.to_thread(wait_until, lambda: "aclosed" in inference.cancelled, "it is cancelled")


async def test_a_cancelled_task_cancels_the_call(target: str, inference: ScriptedInference) -> None:
    async with AsyncClient(target) as client:
        task = asyncio.create_task(client.generate(script(PIECES, [2], hang=True), request_id="task"))
        await asyncio.to_thread(wait_until, lambda: "task" in inference.hanging, "it is asked")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(wait_until, lambda: "task" in inference.cancelled, "it is cancelled")


async def test_what_a_closed_client_was_doing_is_a_typed_error(target: str) -> None:
    """Nobody has cancelled the task: a CancelledError there would end it without a word."""
    client = AsyncClient(target)
    stream = client.stream(script(PIECES, [2], hang=True))
    assert (await anext(stream)).text == ""
    assert (await anext(stream)).token_ids == (100,)
    waiting = asyncio.create_task(anext(stream))  # type: ignore[arg-type, var-annotated]
    await asyncio.sleep(0.05)
    await client.close()
    with pytest.raises(Cancelled, match="closed"):
        await waiting


def test_a_closed_client_says_that_it_is_closed(target: str) -> None:
    client = Client(target)
    client.close()
    for call in (client.models, lambda: client.generate("hi"), lambda: list(client.adapters.summaries())):
        with pytest.raises(Cancelled, match="closed"):
            call()


async def test_a_closed_client_for_asyncio_says_so_too(target: str) -> None:
    client = AsyncClient(target)
    await client.close()
    for call in (client.models, lambda: client.generate("hi")):
        with pytest.raises(Cancelled, match="closed"):
            await call()


class Leaving:
    """A server that goes away and comes back on the same port."""

    def __init__(self, port: int) -> None:
        self.inference, self.port = ScriptedInference(), port
        self._thread = ServerThread()
        self.come()

    def come(self) -> None:
        self._server, _ = self._thread.start(self._add, self.port)

    def go(self) -> None:
        self._thread.stop(self._server)

    def close(self) -> None:
        self.go()
        self._thread.close()

    def _add(self, server: object) -> None:
        inference_pb2_grpc.add_InferenceServicer_to_server(self.inference, server)


@pytest.fixture
def leaving() -> Iterator[Leaving]:
    with ExitStack() as reserved, closing(Leaving(free_port(reserved, "127.0.0.1"))) as leaving:
        yield leaving


def test_a_restarted_server_is_found_again(leaving: Leaving) -> None:
    """The whole server goes away in the middle of a stream and comes back on the same port."""
    with Client(f"127.0.0.1:{leaving.port}") as client:
        stream = client.stream(script(PIECES, [4], hang=True), request_id="restart")
        chunks = [next(stream) for _ in range(4)]
        leaving.go()
        rest: list[str] = []
        reader = threading.Thread(target=lambda: rest.extend(chunk.text for chunk in stream))
        reader.start()
        time.sleep(0.5)  # the client finds nobody for a while
        leaving.come()
        reader.join(60)
        assert "".join(chunk.text for chunk in chunks) + "".join(rest) == TEXT


@both
def test_a_server_that_dies_with_what_it_has_not_begun_yet_loses_nothing(kind: str, leaving: Leaving) -> None:
    prompt = script(PIECES, [0], hang=True, accept=True)
    answers: list[Generation] = []

    def ask() -> None:
        answers.append(generate(kind, f"127.0.0.1:{leaving.port}", prompt, request_id="early"))

    caller = threading.Thread(target=ask)
    caller.start()
    wait_until(lambda: "early" in leaving.inference.hanging, "it is asked")
    leaving.go()
    time.sleep(1.5)  # longer than a request that nobody accepted is tried
    leaving.come()
    caller.join(60)
    assert [answer.text for answer in answers] == [TEXT]


def test_nobody_at_the_port_is_one_clear_error() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(Unavailable):
        client.models()


def test_a_server_that_is_slow_to_answer_a_new_connection_is_waited_for(target: str) -> None:
    """One that is busy, or far away: most calls are not repeated."""
    port = int(target.rpartition(":")[2])
    with Proxy(port, delay=lambda size: 0.5) as proxy, Client(f"127.0.0.1:{proxy.port}") as client:
        assert client.models().adapters == ()


# As HTTP/2 numbers them. gRPC's server resets with CANCEL what it has not taken up in time.
RESETS = {"NO_ERROR": 0, "INTERNAL_ERROR": 2, "REFUSED_STREAM": 7, "CANCEL": 8}
LOST = {**{name: [reset(code)] for name, code in RESETS.items()}, "no trailers": [no_trailers()]}


@both
@pytest.mark.parametrize("end", [*LOST.values(), [http_status(500)], [http_status(503)]])
def test_a_call_that_ends_before_a_server_says_a_word_is_tried_again(
    kind: str, end: list[bytes], target: str
) -> None:
    with DroppingProxy(int(target.rpartition(":")[2]), end) as proxy:
        answer = generate(kind, f"127.0.0.1:{proxy.port}", script(PIECES, []))
    assert (answer.text, answer.token_ids) == (TEXT, TOKENS)


@both
@pytest.mark.parametrize("end", LOST.values(), ids=LOST.keys())
def test_an_accepted_call_that_ends_without_a_servers_word_goes_on(
    kind: str, end: list[bytes], target: str, inference: ScriptedInference
) -> None:
    request_id = uuid.uuid4().hex
    first = inference_pb2.GenerateChunk(request_id=request_id, seed=SEED, token_ids=[100], text=PIECES[0])
    with DroppingProxy(int(target.rpartition(":")[2]), [accepted(), message(first), *end]) as proxy:
        answer = generate(kind, f"127.0.0.1:{proxy.port}", script(PIECES, []), request_id=request_id)
    assert (answer.text, answer.token_ids) == (TEXT, TOKENS)
    # Where gRPC drops what came together with the end, nothing was delivered yet.
    [again] = inference.requests[request_id]
    assert [*again.resume.output_token_ids] in ([100], [])


@both
def test_a_client_that_knows_two_servers_goes_on_at_the_other(
    kind: str, target: str, inference: ScriptedInference
) -> None:
    """Both in one target, in gRPC's own form; the first one goes away and does not come back."""
    answers: list[Generation] = []
    request_id = f"two-{kind}"
    with Proxy(int(target.rpartition(":")[2])) as first:
        known = f"ipv4:127.0.0.1:{first.port},{target}"
        prompt = script(PIECES, [3], hang=True)
        caller = threading.Thread(
            target=lambda: answers.append(generate(kind, known, prompt, request_id=request_id))
        )
        caller.start()
        wait_until(lambda: request_id in inference.hanging, "it is asked")
    caller.join(60)
    assert [answer.text for answer in answers] == [TEXT]
    assert len(inference.requests[request_id]) == 2
