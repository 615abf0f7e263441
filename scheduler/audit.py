"""The audit log: who was refused, and who changed what. One line each, by the logger lorafleet.audit.

A line has the caller's tenant, the kind of its identity and what names it there (never a token), its address,
the method, the adapter as it was asked for or the executor, and how it ended. All changes are written; of
refusals and of changes that failed only so many a second, and then how many were left out.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass

import grpc

from scheduler.admission.identity import Identity
from scheduler.errors import PermissionDenied, SchedulerError, Unauthenticated

logger = logging.getLogger("lorafleet.audit")

MAX_LINES = 20  # In a window, of each kind.
WINDOW_S = 1.0
MAX_FIELD_CHARS = 1200  # A split alias has 16 digests.
OTHER = "other"
# A call of these that fails is told, too. A new call that changes something belongs here.
CHANGES = frozenset(
    f"/lorafleet.v1.{method}"
    for method in (
        "Adapters/Push",
        "Adapters/Delete",
        "Adapters/SetAlias",
        "Adapters/DeleteAlias",
        "Adapters/Protect",
        "Adapters/Unprotect",
        "Adapters/Pin",
        "Adapters/Unpin",
        "Adapters/Drop",
        "Adapters/Drain",
        "Adapters/Activate",
        "Adapters/DeleteDamaged",
        "Adapters/Verify",
        "Adapters/Collect",
        "Fleet/Cordon",
        "Fleet/Drain",
    )
)


@dataclass(slots=True)
class _Window:
    since: float
    lines: int = 0
    left_out: int = 0


class Audit:
    """Writes the lines of one server."""

    def __init__(
        self,
        methods: Collection[str],
        count: Callable[[str, str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`count` gets code, reason and method of every refusal; a method that is not one of `methods`
        ("/package.Service/Method") counts as "other"."""
        self._methods = frozenset(methods)
        self._count = count
        self._clock = clock
        self._windows: dict[str, _Window] = {}  # By kind of line.

    def ended(self, call: "Call", context: grpc.aio.ServicerContext, error: SchedulerError) -> None:
        """A call ended with an error. On the event loop."""
        method = call.method
        if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            self._count(error.code.name, error.reason, method if method in self._methods else OTHER)
        if isinstance(error, Unauthenticated | PermissionDenied):
            reason = error.cause if isinstance(error, Unauthenticated) else error.metadata.get("right", "")
            self._count(error.code.name, reason, method if method in self._methods else OTHER)
            # Nobody who is unknown can keep the lines of those who are known from being written.
            kind, told = error.code.name, "refused"
        elif method in CHANGES:
            kind, told, reason = "failed", "failed", error.reason
        else:
            return
        if self._may_write(kind):
            fields = self._fields(call, context)
            fields |= {"adapter": call.asked_for, "code": error.code.name, "reason": reason}
            logger.warning(told, extra=_cut(fields))

    def changed(
        self, call: "Call", context: grpc.aio.ServicerContext, what: str, about: dict[str, str]
    ) -> None:
        """A change was made."""
        logger.info("%s", what, extra=_cut(self._fields(call, context) | about | {"code": "OK"}))

    def _fields(self, call: "Call", context: grpc.aio.ServicerContext) -> dict[str, str]:
        fields = {"caller": "", "identity": "", "subject": ""}
        if caller := call.caller:
            fields = {"caller": caller.tenant, "identity": caller.kind, "subject": caller.subject}
        return fields | {"peer": context.peer(), "method": call.method}

    def _may_write(self, kind: str) -> bool:
        now = self._clock()
        window = self._windows.get(kind)
        if window is None or now - window.since >= WINDOW_S:
            self._close(kind)
            window = self._windows[kind] = _Window(now)
        window.lines += 1
        if window.lines <= MAX_LINES:
            return True
        window.left_out += 1
        if window.left_out == 1:
            asyncio.get_running_loop().call_later(WINDOW_S, self._close, kind, window)
        return False

    def _close(self, kind: str, window: _Window | None = None) -> None:
        """Tells what was left out, once."""
        window = window or self._windows.get(kind)
        if window and window.left_out:
            told = {
                "kind": kind,
                "left_out": window.left_out,
                "seconds": round(self._clock() - window.since, 1),
            }
            window.left_out = 0
            logger.warning("lines were left out", extra=told)


@dataclass(slots=True)
class Call:
    audit: Audit
    method: str
    asked_for: str = ""
    caller: Identity | None = None  # When it began: its token may end before it does.


# Of the call that the running task serves: a context of gRPC tells neither its method nor its server.
_CALL: ContextVar[Call | None] = ContextVar("audited_call", default=None)


class AuditInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """The outermost one: what is refused or changed behind it has a place in the log."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        _CALL.set(Call(self._audit, handler_call_details.method))
        return await continuation(handler_call_details)


def is_made_by(caller: Identity) -> None:
    """Who makes the running call."""
    if call := _CALL.get():
        call.caller = caller


def caller() -> Identity:
    """Who makes the running call, as its door has found; that stays so until it ends. Raises LookupError
    where no door has asked: nobody gets in so."""
    call = _CALL.get()
    if call is None or call.caller is None:
        raise LookupError("who makes this call was not asked at the door")
    return call.caller


def asks_for(adapter: str) -> None:
    """The adapter that the running call is about, in its caller's words. What is said first counts."""
    if (call := _CALL.get()) and not call.asked_for:
        call.asked_for = adapter


def ended(context: grpc.aio.ServicerContext, error: SchedulerError) -> None:
    """To be called where a call ends with an error: once."""
    if call := _CALL.get():
        call.audit.ended(call, context, error)


def changed(context: grpc.aio.ServicerContext, what: str, **about: str) -> None:
    """To be called when the running call has changed something."""
    if call := _CALL.get():
        call.audit.changed(call, context, what, about)


def _cut(fields: dict[str, str]) -> dict[str, str]:
    return {name: value[:MAX_FIELD_CHARS] for name, value in fields.items()}
