"""What the product is compared with: a bare server that writes the same chunks at the same pace."""

import asyncio

import grpc

from lorafleet.v1 import inference_pb2, inference_pb2_grpc
from scheduler.bench.streaming.pace import Record, ticks, token_at


class BareServer(inference_pb2_grpc.InferenceServicer):
    """It has as many groups of streams as there are executors; those of a group get their tokens together."""

    def __init__(self, step_s: float, record: Record) -> None:
        self._step_s = step_s
        self._record = record
        self._ticked = [asyncio.Event() for _ in record.steps]

    async def run(self, group: int) -> None:
        """Makes tokens until it is cancelled."""
        steps = self._record.steps
        async for _ in ticks(group, len(steps), self._step_s, steps[group]):
            former, self._ticked[group] = self._ticked[group], asyncio.Event()
            former.set()

    async def GenerateStream(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        stream = request.sampling.seed
        group = stream % len(self._record.steps)
        steps = self._record.steps[group]
        begun = len(steps)
        self._record.begun[stream] = group, begun
        for index in range(request.stopping.max_new_tokens):
            while len(steps) <= begun + index:
                await self._ticked[group].wait()
            token = token_at(index)
            chunk = inference_pb2.GenerateChunk(output_index=index, token_ids=[token], text=chr(token))
            await context.write(chunk)
