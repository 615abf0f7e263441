"""The scheduler's door: who comes in, how much a method reads, and how others are refused."""

import logging
from collections.abc import Callable
from typing import NoReturn

import grpc

from lorafleet.doors import REFLECTION, Limits, Refused
from lorafleet.doors.peers import host
from scheduler import audit
from scheduler.admission.auth import Authenticator
from scheduler.errors import SchedulerError, from_exception
from scheduler.grpc_options import MAX_MESSAGE_BYTES
from scheduler.rpc_errors import abort

logger = logging.getLogger(__name__)

_KIB = 1024
LIMITS = Limits(
    message_bytes={
        # A prompt, as text or as token ids: how long it may be is known once it can be counted.
        "lorafleet.v1.Inference/Generate": MAX_MESSAGE_BYTES,
        "lorafleet.v1.Inference/GenerateStream": MAX_MESSAGE_BYTES,
        "lorafleet.v1.Inference/Tokenize": MAX_MESSAGE_BYTES,
        "lorafleet.v1.Adapters/Push": 5 * _KIB * _KIB,  # Pieces of up to 4 MiB.
        "grpc.health.v1.Health": 4 * _KIB,
        REFLECTION: 16 * _KIB,
    }
)


class Doorkeeper:
    """`count` gets the reason of each refusal."""

    def __init__(self, authenticator: Authenticator, count: Callable[[str], object]) -> None:
        self._authenticator = authenticator
        self._count = count

    def who(self, context: grpc.aio.ServicerContext) -> str:
        """Raises Unauthenticated."""
        caller = self._authenticator.caller(context)
        audit.is_made_by(caller)
        return caller.tenant

    def refused(self, context: grpc.aio.ServicerContext, method: str, error: Exception) -> None:
        if isinstance(error, SchedulerError | Refused):
            self._count(error.reason)
        if isinstance(error, Refused):
            logger.warning("refused %s from %s: %s: %s", method, host(context.peer()), error.reason, error)

    async def abort(self, context: grpc.aio.ServicerContext, error: Exception) -> NoReturn:
        await abort(context, from_exception(error))
