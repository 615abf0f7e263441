"""Which constraints answers can be held to: found by workers, and remembered."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection
from pathlib import Path

from lorafleet.v1 import common_pb2
from scheduler.errors import InvalidRequest, NoConstraints
from scheduler.workers.workers import MAX_TENANT_CALLS, CannotWork, Workers, WorkerStopped

CPU_LIMIT_S = 1.0
MAX_KNOWN = 4096  # Constraints whose fate is remembered: by digest, so that one takes some 200 bytes.
# So small a choice costs an executor next to nothing, and every model has tokens for what is ASCII.
SMALL_CHOICES, SMALL_CHOICE_BYTES = 256, 8192


class Constraints:
    """Used from one event loop; `close` ends the worker processes."""

    def __init__(
        self,
        model: Path,
        vocab_size: int,
        end_token_ids: Collection[int],
        *,
        cpu_limit_s: float = CPU_LIMIT_S,
        max_calls: Callable[[str], int] = lambda tenant: MAX_TENANT_CALLS,
    ) -> None:
        """`max_calls` of a tenant may have a worker or wait for one."""
        ends = ",".join(map(str, sorted(end_token_ids)))
        self._workers = Workers(
            "constraints under check",
            "TOO_MANY_CONSTRAINTS",
            ("scheduler.admission.constraint_worker", str(model), str(vocab_size), ends, str(cpu_limit_s)),
            max_calls=max_calls,
        )
        self._has_ends = bool(ends)
        self._unfit = ""  # Why there are no workers for this model.
        self._known = OrderedDict[bytes, tuple[str, str] | None]()  # What is wrong, and where; None: good.

    async def check(self, constraint: common_pb2.Constraint, *, tenant: str, key: str = "") -> None:
        """Of a form that was found good (masks.py). Raises InvalidRequest, NoConstraints and
        TooMuchHeld."""
        if self._has_ends and _is_small(constraint):
            return
        data = constraint.SerializeToString(deterministic=True)
        digest = hashlib.sha256(data).digest()
        if digest in self._known:
            self._known.move_to_end(digest)
        else:
            self._known[digest] = await self._ask(data, tenant, key)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        if wrong := self._known[digest]:
            description, place = wrong
            raise InvalidRequest(f"constraint.{constraint.WhichOneof('kind')}{place}", description)

    async def close(self) -> None:
        await self._workers.close()

    async def _ask(self, data: bytes, tenant: str, key: str) -> tuple[str, str] | None:
        if self._unfit:
            raise NoConstraints(self._unfit)
        try:
            answer = await self._workers.ask({"constraint": data.hex()}, tenant=tenant, key=key)
        except WorkerStopped:
            return "takes too much time or memory to check", ""
        except CannotWork as error:
            self._unfit = f"answers of this model cannot be held to constraints: {error}"
            raise NoConstraints(self._unfit) from error
        return (answer["error"], answer["place"]) if answer else None


def _is_small(constraint: common_pb2.Constraint) -> bool:
    match constraint.WhichOneof("kind"):
        case "json_object":
            return True
        case "choice":
            choices, size = constraint.choice.choices, constraint.ByteSize()
            is_small = len(choices) <= SMALL_CHOICES and size <= SMALL_CHOICE_BYTES
            return is_small and all(map(str.isascii, choices))
        case _:
            return False
