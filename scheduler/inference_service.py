"""The Inference service: it turns messages into a call and back; what it means is decided elsewhere."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager

import grpc

from adapter_store import AdapterStore, ModelSpec
from lorafleet.v1 import inference_pb2, inference_pb2_grpc
from scheduler.admission.admission import Admission, Authenticator
from scheduler.dispatch.dispatcher import Dispatcher
from scheduler.dispatch.live_request import LiveRequest, Piece
from scheduler.errors import Draining, from_exception
from scheduler.metrics import Metrics
from scheduler.model_listing import list_models
from scheduler.rpc_errors import translate_errors

_ACCEPTED = (("lorafleet-accepted", "true"),)


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Blocking work goes to `pool`."""

    def __init__(
        self,
        authenticator: Authenticator,
        admission: Admission,
        dispatcher: Dispatcher,
        store: AdapterStore,
        spec: ModelSpec,
        metrics: Metrics,
        pool: Executor,
    ) -> None:
        self._authenticator = authenticator
        self._admission = admission
        self._dispatcher = dispatcher
        self._store = store
        self._spec = spec
        self._metrics = metrics
        self._pool = pool

    @translate_errors
    async def GenerateStream(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        async with self._accepted(request, context) as live:
            writing = asyncio.ensure_future(_write_all(context, live))
            live.hang_up = writing.cancel
            try:
                await writing
            except asyncio.CancelledError:
                if live.outbox.error:
                    raise live.outbox.error from None
                raise

    @translate_errors
    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.GenerateResponse:
        async with self._accepted(request, context, one_message=True) as live:
            answer = _begin_response(live)
            texts = [live.admitted.echo_text]
            while piece := await live.outbox.get():
                answer.token_ids.extend(piece.token_ids)
                answer.logprobs.extend(piece.logprobs)
                answer.prompt_logprobs.extend(piece.prompt_logprobs)
                answer.finish_reason = piece.finish
                texts.append(piece.text)
            answer.text = "".join(texts)
            answer.usage.CopyFrom(_usage(live))
            return answer

    @translate_errors
    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        identity = self._authenticator.identify(context.invocation_metadata())
        token_ids, tokens = await self._admission.tokenize(request, identity)
        return inference_pb2.TokenizeResponse(
            token_ids=token_ids, tokens=tokens, max_model_len=self._admission.max_model_len
        )

    @translate_errors
    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        identity = self._authenticator.identify(context.invocation_metadata())
        loop = asyncio.get_running_loop()
        models, next_page = await loop.run_in_executor(
            self._pool, list_models, self._store, identity, request
        )
        return inference_pb2.ListModelsResponse(
            base_model=self._spec.name,
            fingerprint=self._spec.fingerprint,
            max_model_len=self._admission.max_model_len,
            models=models,
            next_page_token=next_page,
        )

    @asynccontextmanager
    async def _accepted(
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext,
        *,
        one_message: bool = False,
    ) -> AsyncIterator[LiveRequest]:
        """The request while its call lasts: however that ends, nothing of it stays anywhere."""
        try:
            live = await self._accept(request, context, one_message)
        except Exception as error:
            refusal = from_exception(error)
            self._metrics.ended(refusal.code.name)
            raise refusal from error
        try:
            yield live
        finally:
            self._dispatcher.cancel(live)

    async def _accept(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext, one_message: bool
    ) -> LiveRequest:
        if self._dispatcher.draining:
            raise Draining()
        identity = self._authenticator.identify(context.invocation_metadata())
        self._dispatcher.check_room(identity.tenant)
        admitted = await self._admission.admit(request, identity, one_message=one_message)
        return self._dispatcher.submit(admitted, context.time_remaining())


async def _write_all(context: grpc.aio.ServicerContext, live: LiveRequest) -> None:
    """Waits while the client does not read.

    In a task of its own, which can be cancelled when the client is given up. In `yield`, or in the handler,
    gRPC would wait where only the death of the whole handler could reach, and that ends the call without a
    status.

    That the request is accepted is told at once: should this server die before the first token, a client
    knows that it has to ask again for what is owed to it.
    """
    await context.send_initial_metadata(_ACCEPTED)
    first = True
    while piece := await live.outbox.get():
        await context.write(_chunk(live, piece, first))
        first = False


def _chunk(live: LiveRequest, piece: Piece, first: bool) -> inference_pb2.GenerateChunk:
    chunk = inference_pb2.GenerateChunk(
        output_index=piece.output_index,
        token_ids=piece.token_ids,
        text=piece.text,
        finish_reason=piece.finish,
    )
    if piece.logprobs or piece.prompt_logprobs:
        chunk.logprobs.extend(piece.logprobs)
        chunk.prompt_logprobs.extend(piece.prompt_logprobs)
    if first:
        chunk.request_id = live.admitted.request_id
        chunk.adapter_digest = live.admitted.digest
        chunk.seed = live.admitted.sampling.seed
        chunk.text = live.admitted.echo_text + chunk.text
    if piece.finish:
        chunk.usage.CopyFrom(_usage(live))
    return chunk


def _begin_response(live: LiveRequest) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        request_id=live.admitted.request_id,
        adapter_digest=live.admitted.digest,
        seed=live.admitted.sampling.seed,
    )


def _usage(live: LiveRequest) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=len(live.admitted.prompt_token_ids),
        cached_prompt_tokens=live.cached_prompt_tokens,
        completion_tokens=live.completion_tokens,
    )
