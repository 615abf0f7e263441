"""A real grpc.aio server on a thread of its own whose answers and failures the prompt dictates."""

import asyncio
import json
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio

from lorafleet.errors import ACCEPTED
from lorafleet.v1 import common_pb2, inference_pb2, inference_pb2_grpc

DIGEST = "sha256:" + "ab" * 32
SEED = 2**64 - 1


def script(
    pieces: list[str],
    breaks: list[int],
    sizes: list[int] | None = None,
    code: str = "UNAVAILABLE",
    **more: Any,
) -> str:
    """A prompt: token i completes the text pieces[i]; attempt n ends with `code` after breaks[n] chunks, of
    `sizes` tokens in turn; the attempts after those end well. more: what ScriptedInference reads beside."""
    return json.dumps({"pieces": pieces, "breaks": breaks, "sizes": sizes or [1], "code": code, **more})


class ScriptedInference(inference_pb2_grpc.InferenceServicer):
    """Follows `script`. Token i has the id 100 + i. `requests` are those seen, by request_id."""

    def __init__(self) -> None:
        self.requests: dict[str, list[inference_pb2.GenerateRequest]] = defaultdict(list)
        self.again: dict[str, list[bool]] = defaultdict(
            list
        )  # Whether each said that it was accepted before.
        self.hanging: set[str] = set()
        self.cancelled: set[str] = set()

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse()

    async def GenerateStream(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateChunk]:
        plan = json.loads(request.text)
        if plan.get("accept"):
            await context.send_initial_metadata((ACCEPTED,))
            context.set_trailing_metadata((ACCEPTED,))
        attempts = self.requests[request.request_id]
        attempts.append(request)
        self.again[request.request_id].append(ACCEPTED in tuple(context.invocation_metadata() or ()))
        breaks = plan["breaks"]
        limit = breaks[len(attempts) - 1] if len(attempts) <= len(breaks) else None
        chunks = list(_chunks(request, plan))
        for index, chunk in enumerate(chunks):
            if index == limit:
                break
            yield chunk
        if plan.get("hang") and limit is not None:
            await self._hang(request.request_id)
        if limit is not None:
            await context.abort(grpc.StatusCode[plan["code"]], "as scripted")

    async def _hang(self, request_id: str) -> None:
        self.hanging.add(request_id)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.add(request_id)
            raise


def _chunks(
    request: inference_pb2.GenerateRequest, plan: dict[str, Any]
) -> Iterator[inference_pb2.GenerateChunk]:
    pieces, sizes = plan["pieces"], plan["sizes"]
    have = list(request.resume.output_token_ids)
    if have != [100 + i for i in range(len(have))]:
        raise ValueError(f"resumed with tokens that were never sent: {have}")
    digest, seed = (DIGEST, SEED) if request.HasField("adapter") else ("", request.sampling.seed or SEED)
    if request.HasField("resume") and (request.resume.adapter_digest, request.resume.seed) != (digest, seed):
        raise ValueError("resumed with another version or seed")
    digest = plan.get("resume_digest", digest) if request.HasField("resume") else digest
    echo = "prompt:" if request.response.echo else ""
    # The header goes first and alone, as a server may send it.
    yield inference_pb2.GenerateChunk(
        request_id=request.request_id, adapter_digest=digest, seed=seed, output_index=len(have), text=echo
    )
    start, turn = len(have), 0
    while start < len(pieces):
        end = min(len(pieces), start + sizes[turn % len(sizes)])
        last = end == len(pieces)
        yield inference_pb2.GenerateChunk(
            output_index=start,
            token_ids=range(100 + start, 100 + end),
            text="".join(pieces[start:end]),
            finish_reason=common_pb2.FINISH_REASON_STOP if last else common_pb2.FINISH_REASON_UNSPECIFIED,
            usage=inference_pb2.Usage(prompt_tokens=3, completion_tokens=len(pieces)) if last else None,
        )
        start, turn = end, turn + 1


class ServerThread:
    """Starts and stops grpc.aio servers on an event loop that runs on its own thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, add_services: Any, port: int = 0) -> tuple[grpc.aio.Server, int]:
        """add_services(server) registers the servicers. Returns the server and its port."""

        async def start() -> tuple[grpc.aio.Server, int]:
            server = grpc.aio.server()
            add_services(server)
            bound = server.add_insecure_port(f"127.0.0.1:{port}")
            await server.start()
            return server, bound

        return asyncio.run_coroutine_threadsafe(start(), self._loop).result(60)

    def stop(self, server: grpc.aio.Server) -> None:
        asyncio.run_coroutine_threadsafe(server.stop(None), self._loop).result(60)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()


@contextmanager
def serving(add_services: Any) -> Iterator[str]:
    """The address of a server with these services."""
    thread = ServerThread()
    server, port = thread.start(add_services)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        thread.stop(server)
        thread.close()
