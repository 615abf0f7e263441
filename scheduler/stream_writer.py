"""Writes answers to their clients as they grow, and gives up clients that do not read."""

import asyncio

import grpc

from lorafleet.v1 import inference_pb2
from scheduler.dispatch.live_request import LiveRequest
from scheduler.errors import SlowClient
from scheduler.ledger.answer_id import HEADER
from scheduler.ledger_entry import LedgerEntry
from scheduler.metrics import Metrics
from scheduler.pace import Pace

ACCEPTED = ("lorafleet-accepted", "true")  # Of a stream.
WRITING = "stream writer"  # Name of each one's task.
LOOKS = 4


class StreamWriter:
    """`slow_client_timeout_s` counts from the first write that the client's transport does not take."""

    def __init__(self, pace: Pace, slow_client_timeout_s: float, metrics: Metrics) -> None:
        self._pace = pace
        self._look_s = slow_client_timeout_s / LOOKS
        self._chunk_tokens = metrics.chunk_tokens
        self._writing: dict[asyncio.Task[None], _Watch] = {}
        self._looking: asyncio.TimerHandle | None = None
        self._whole: set[asyncio.Future[None]] = set()

    async def write(self, context: grpc.aio.ServicerContext, entry: LedgerEntry) -> None:
        """All of an answer. Raises what the request failed with, and SlowClient."""
        watch = _Watch()
        writing = asyncio.create_task(self._write_all(context, entry, watch), name=WRITING)
        self._writing[writing] = watch
        if self._looking is None:
            self._look_later()
        try:
            await writing
        except asyncio.CancelledError:
            if watch.gave_up:
                raise entry.live.outbox.error or SlowClient("the client reads too slowly") from None
            raise
        finally:
            del self._writing[writing]

    def follow(self, context: grpc.aio.ServicerContext) -> None:
        """A call whose answer is one message, which gRPC sends when the handler is over: `drain` waits for
        that, too."""
        sent = asyncio.get_running_loop().create_future()

        def end(_: object) -> None:
            self._whole.discard(sent)
            sent.set_result(None)

        self._whole.add(sent)
        context.add_done_callback(end)

    async def drain(self, timeout_s: float) -> bool:
        """Waits for the answers that are under way, some of them complete. Whether all of them ended in time.

        Who does not read a stream at all is given up meanwhile, as ever.
        """
        if under_way := {*self._writing, *self._whole}:
            _, left = await asyncio.wait(under_way, timeout=timeout_s)
            return not left
        return True

    def _look_later(self) -> None:
        self._looking = asyncio.get_running_loop().call_later(self._look_s, self._look)

    def _look(self) -> None:
        """At all streams: a timer for each costs more than all else that a silent stream does."""
        for writing, watch in self._writing.items():
            if watch.look():
                writing.cancel()
        self._looking = None
        if self._writing:
            self._look_later()

    async def _write_all(
        self, context: grpc.aio.ServicerContext, entry: LedgerEntry, watch: "_Watch"
    ) -> None:
        """Waits while the client does not read.

        In a task of its own, which can be cancelled when the client is given up. In `yield`, or in the
        handler, gRPC would wait where only the death of the whole handler could reach, and that ends the call
        without a status.

        That the request is accepted is told at once: should this server die before the first token, a client
        knows that it has to ask again for what is owed to it, and under which name. And once more at the end:
        gRPC's asyncio client drops headers that it finds together with a status.
        """
        self._pace.begins()
        live, told = entry.live, (ACCEPTED, (HEADER, str(entry.answer_id)))
        context.set_trailing_metadata(told)
        watch.blocked = True
        await context.send_initial_metadata(told)
        watch.blocked = False
        watch.writes += 1
        outbox, first = live.outbox, True
        while chunk := await outbox.get():
            if first:
                _introduce(chunk, entry)
                first = False
            if chunk.finish_reason:
                chunk.usage.CopyFrom(usage(live))
                entry.finish(chunk.finish_reason)
            watch.blocked = True
            await context.write(chunk)
            watch.blocked = False
            watch.writes += 1
            self._chunk_tokens.observe(len(chunk.token_ids))
            if self._pace.pause_s:
                outbox.pause(self._pace.pause_s)


class _Watch:
    """Gives a write up that is still under way at one look after the other, `LOOKS` and one of them.

    Looks are counted, not time: when this process itself did not run for a while, that is one look. And it
    costs a write no timer of its own.
    """

    def __init__(self) -> None:
        self.blocked = False
        self.writes = 0  # That are done.
        self.gave_up = False
        self._seen = -1  # Number of the write that was under way at the last look.
        self._looks = 0  # At which it was, the first left out.

    def look(self) -> bool:
        """Whether the write is to be given up now."""
        still = self.blocked and self.writes == self._seen
        self._looks = self._looks + 1 if still else 0
        self._seen = self.writes if self.blocked else -1
        self.gave_up = self._looks >= LOOKS
        return self.gave_up


def _introduce(chunk: inference_pb2.GenerateChunk, entry: LedgerEntry) -> None:
    """What only the first chunk of a stream has."""
    live = entry.live
    chunk.answer_id = str(entry.answer_id)
    chunk.request_id = live.admitted.request_id
    chunk.adapter_digest = live.admitted.digest
    chunk.seed = live.admitted.sampling.seed
    chunk.masked = bool(live.admitted.masks)
    chunk.text = live.admitted.echo_text + chunk.text


def usage(live: LiveRequest) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=len(live.admitted.prompt_token_ids),
        cached_prompt_tokens=live.cached_prompt_tokens,
        completion_tokens=live.completion_tokens,
    )
