"""What a service refuses at its door, before any of its own code has seen the call.

Refused
├── InvalidMessage    INVALID_ARGUMENT    bytes that are no message of the method's type
├── MessageTooLarge   INVALID_ARGUMENT    a message above the limit of its method
├── NotOneMessage     INVALID_ARGUMENT    a method of one message got none, or several
├── SlowMessage       DEADLINE_EXCEEDED   a message that does not come to its end
├── TooManyMessages   RESOURCE_EXHAUSTED  more large or slow messages at once than are read or kept
└── TooManyCalls      RESOURCE_EXHAUSTED  more calls, a second or open, than one address may make
"""

import grpc


class Refused(Exception):
    """`reason` is stable and machine-readable; `retry_after_s` is None when a retry cannot help."""

    code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT
    reason = "REFUSED"
    retry_after_s: float | None = None


class InvalidMessage(Refused):
    reason = "INVALID_MESSAGE"


class MessageTooLarge(Refused):
    reason = "MESSAGE_TOO_LARGE"


class NotOneMessage(Refused):
    """gRPC's own word for it is UNIMPLEMENTED, which our clients take for an older server."""

    reason = "NOT_ONE_MESSAGE"


class SlowMessage(Refused):
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "SLOW_MESSAGE"


class Exhausted(Refused):
    """Never raised itself: what passes."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooManyMessages(Exhausted):
    reason = "TOO_MANY_MESSAGES"


class TooManyCalls(Exhausted):
    reason = "TOO_MANY_CALLS"
