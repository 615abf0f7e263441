"""A failed call as one line: what is wrong, and what to do about it."""

from collections.abc import Sequence

from lorafleet.errors import (
    AdapterNotFound,
    DeadlineExceeded,
    LoraFleetError,
    PermissionDenied,
    QueueFull,
    Unauthenticated,
    Unavailable,
)
from lorafleet.tls.trouble import Settings, Trouble, describe

_NAMES = Settings(
    use="--tls", ca="--tls-ca", cert="--tls-cert and --tls-key", off="leave --tls and its files out"
)


def explain(error: LoraFleetError, target: str, near: Sequence[str] = ()) -> str:
    """target: whom was called. near: refs that may have been meant, for AdapterNotFound."""
    if "tls" in error.metadata:
        return f"cannot reach a scheduler at {target}: {describe(Trouble(error.metadata['tls']), _NAMES)}"
    if isinstance(error, Unavailable) and not error.reason:  # from the network: no server of ours said it
        return (
            f"cannot reach a scheduler at {target} ({_cause(error.message)});"
            " `lorafleet serve` starts one, --target or LORAFLEET_TARGET names another"
        )
    if near:
        return f"{error.message}; did you mean {' or '.join(near)}?"
    return error.message + _advice(error)


def _cause(message: str) -> str:
    """The end of gRPC's own account, which says what happened."""
    if "tls" in message.lower():
        return "no TLS connection came about"
    return message.rpartition(": ")[2].rstrip("]")


def _advice(error: LoraFleetError) -> str:
    match error:
        case Unavailable(reason="NO_EXECUTOR"):
            return "; `lorafleet top --once` tells why of each"
        case Unavailable() | QueueFull() if error.retry_after:
            return f"; try again in {error.retry_after:g} s"
        case AdapterNotFound():
            return "; `lorafleet models` lists what you may use"
        case Unauthenticated():
            return "; set LORAFLEET_TOKEN to your token"
        case PermissionDenied():
            return "; ask the operator for this right"
        case DeadlineExceeded() if error.retry_after:
            return f"; --timeout allows more, or try again in {error.retry_after:g} s"
        case DeadlineExceeded():
            return "; --timeout allows more"
    return ""
