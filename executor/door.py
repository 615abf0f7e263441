"""The executor's door: bounds on what schedulers send, and one line for what comes no further."""

import logging
from collections.abc import Callable
from typing import NoReturn

import grpc

from lorafleet.doors import REFLECTION, Limits, Refused
from lorafleet.doors.peers import host

logger = logging.getLogger(__name__)

LIMITS = Limits(
    message_bytes={
        "lorafleet.v1.Executor/Execute": 16 << 20,  # A dispatch has its prompt.
        "grpc.health.v1.Health": 4 << 10,
        REFLECTION: 16 << 10,
    },
    streams=256,
)


class Doorkeeper:
    """`count` gets the reason of each refusal. Who a caller is, is its connection's to say."""

    def __init__(self, count: Callable[[str], object]) -> None:
        self._count = count

    def who(self, context: grpc.aio.ServicerContext) -> str:
        return host(context.peer())

    def refused(self, context: grpc.aio.ServicerContext, method: str, error: Exception) -> None:
        if isinstance(error, Refused):
            self._count(error.reason)
            logger.warning("refused %s from %s: %s: %s", method, host(context.peer()), error.reason, error)

    async def abort(self, context: grpc.aio.ServicerContext, error: Exception) -> NoReturn:
        if isinstance(error, Refused):
            await context.abort(error.code, f"{error.reason}: {error}")
        raise error
