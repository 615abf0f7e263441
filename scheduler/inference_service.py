"""The Inference service: it turns messages into a call and back; what it means is decided elsewhere."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Executor
from contextlib import asynccontextmanager

import grpc

from adapter_store import ModelSpec, Resolver
from lorafleet.doors import message_is_done
from lorafleet.doors.held import Held
from lorafleet.v1 import inference_pb2, inference_pb2_grpc
from scheduler import audit
from scheduler.admission.admission import Admission
from scheduler.admission.validation import check_labels
from scheduler.dispatch.dispatcher import Dispatcher
from scheduler.errors import Draining, SchedulerError, from_exception
from scheduler.ledger.answer_id import HEADER, AnswerId, AnswerIds
from scheduler.ledger.ledger import Ledger
from scheduler.ledger_entry import LedgerEntry
from scheduler.metrics import Metrics
from scheduler.model_listing import list_models
from scheduler.rpc_errors import translate_errors
from scheduler.stream_writer import StreamWriter, usage

# A whole answer is put together so many times a second: nobody waits for its parts.
_WHOLE_EVERY_S = 0.25


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Blocking work goes to `pool`."""

    def __init__(
        self,
        admission: Admission,
        dispatcher: Dispatcher,
        writer: StreamWriter,
        ledger: Ledger,
        answer_ids: AnswerIds,
        store: Resolver,
        spec: ModelSpec,
        metrics: Metrics,
        pool: Executor,
        listings: Held,
    ) -> None:
        self._admission = admission
        self._dispatcher = dispatcher
        self._writer = writer
        self._ledger = ledger
        self._answer_ids = answer_ids
        self._store = store
        self._spec = spec
        self._metrics = metrics
        self._pool = pool
        self._listings = listings

    @translate_errors
    async def GenerateStream(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        accepted = self._accepted(request, context)
        del request
        async with accepted as entry:
            await self._writer.write(context, entry)

    @translate_errors
    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.GenerateResponse:
        self._writer.follow(context)
        accepted = self._accepted(request, context, one_message=True)
        del request
        async with accepted as entry:
            live, answer = entry.live, _begin_response(entry)
            texts = [live.admitted.echo_text]
            while chunk := await live.outbox.get():
                answer.token_ids.extend(chunk.token_ids)
                answer.logprobs.extend(chunk.logprobs)
                answer.prompt_logprobs.extend(chunk.prompt_logprobs)
                answer.finish_reason = chunk.finish_reason
                texts.append(chunk.text)
                live.outbox.pause(_WHOLE_EVERY_S)
            answer.text = "".join(texts)
            answer.usage.CopyFrom(usage(live))
            entry.finish(answer.finish_reason)
            return answer

    @translate_errors
    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        identity = audit.caller()
        token_ids, tokens = await self._admission.tokenize(request, identity)
        return inference_pb2.TokenizeResponse(
            token_ids=token_ids, tokens=tokens, max_model_len=self._admission.max_model_len
        )

    @translate_errors
    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        identity = audit.caller()
        loop = asyncio.get_running_loop()
        with self._listings.one(identity.tenant):
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
    ) -> AsyncIterator[LedgerEntry]:
        """The request while its call lasts: however that ends, it is recorded and nothing of it stays
        anywhere. What it came as goes before: unknown fields, say, may make that as large as they like."""
        try:
            entry = await self._accept(request, context, one_message)
        except Exception as error:
            refusal = from_exception(error)
            self._metrics.ended(refusal.code.name)
            raise refusal from error
        del request
        message_is_done()
        outcome = grpc.StatusCode.CANCELLED
        try:
            yield entry
        except Exception as error:
            outcome = error.code if isinstance(error, SchedulerError) else grpc.StatusCode.INTERNAL
            raise
        finally:
            self._dispatcher.cancel(entry.live)
            entry.live.outbox.close()
            entry.end(outcome.name)

    async def _accept(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext, one_message: bool
    ) -> LedgerEntry:
        if self._dispatcher.draining:
            raise Draining()
        check_labels(request)  # Who is refused for a quota is known by its id from here on.
        identity = audit.caller()
        answer_id = self._answer_id(request, dict(context.invocation_metadata() or ()), identity.tenant)
        again = self._answer_ids.is_paid(answer_id)
        self._ledger.check(again=again)
        max_model_len = self._admission.max_model_len
        self._dispatcher.room.check(identity.tenant, request, max_model_len, again=again)
        admitted = await self._admission.admit(request, identity, one_message=one_message)
        again = self._answer_ids.is_paid(answer_id)  # Others may have come with it meanwhile.
        live = self._dispatcher.submit(admitted, context.time_remaining(), again=again)
        self._answer_ids.taken_up(answer_id)
        return LedgerEntry(self._ledger, answer_id, live)

    def _answer_id(
        self, request: inference_pb2.GenerateRequest, metadata: Mapping[str, str | bytes], tenant: str
    ) -> AnswerId:
        """A new one, too, for what a client calls an answer to this request and what is none. Raises
        InvalidRequest."""
        ids, known = self._answer_ids, None
        if told := request.resume.answer_id:
            known = ids.after(told, "resume.answer_id", tenant, request)
        elif header := metadata.get(HEADER):
            known = ids.after(str(header), HEADER, tenant, request)
        return known or ids.draw(tenant, request)


def _begin_response(entry: LedgerEntry) -> inference_pb2.GenerateResponse:
    live = entry.live
    return inference_pb2.GenerateResponse(
        request_id=live.admitted.request_id,
        adapter_digest=live.admitted.digest,
        seed=live.admitted.sampling.seed,
        answer_id=str(entry.answer_id),
        masked=bool(live.admitted.masks),
    )
