"""The scheduler's own name for an answer, which its client sends back with a resumption.

It proves, too, that a request was accepted: half of its key is a signature over whose request it is, when it
came and what it costs. Without one, or a day later, a request that is said to have been accepted before is a
new one, with all quotas.
"""

import hmac
import json
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from lorafleet.v1 import inference_pb2
from scheduler.errors import InvalidRequest

HEADER = "lorafleet-answer-id"  # Of a stream; and of a call that asks for a lost answer again.
MOST_TIMES = 3  # That one scheduler takes an answer up again which it was paid for once.
MOST_KEPT = 131_072  # Answers that were taken up again; of others before them it is not known how often.
MOST_AGE_S = 86_400.0  # Else who collects them for long enough always has some that nobody knows any more.
_FORM = re.compile(r"([0-9a-f]{32})\.(0|[1-9][0-9]{0,5})")
_TIME = 8  # Digits of the key that say when the answer began.
_DRAWN = 16  # Digits with those that are drawn; the others sign.


@dataclass(frozen=True, slots=True)
class AnswerId:
    """`key` is that of the answer's records; `part` counts the resumptions, so that parts have an order which
    no clock decides."""

    key: str
    part: int = 0

    def __str__(self) -> str:
        return f"{self.key}.{self.part}"


class AnswerIds:
    """`secret` is that of all schedulers that may take each other's answers up (AdapterStore.secret)."""

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.time) -> None:
        """`clock` is in seconds of a time that all schedulers have."""
        self._secret, self._clock = secret, clock
        self._times = OrderedDict[str, int]()  # By key: how often it was taken up again here.

    def draw(self, tenant: str, request: inference_pb2.GenerateRequest) -> AnswerId:
        """The id of a request that is new."""
        drawn = f"{int(self._clock()):0{_TIME}x}{secrets.token_hex((_DRAWN - _TIME) // 2)}"
        return AnswerId(drawn + self._signature(drawn, tenant, request))

    def after(
        self, told: str, field: str, tenant: str, request: inference_pb2.GenerateRequest
    ) -> AnswerId | None:
        """The id of the part that follows the one whose client sends `told`, as `field`. None: that is no
        answer to this request of this tenant, or an old one. Raises InvalidRequest."""
        match = _FORM.fullmatch(told)
        if match is None:
            raise InvalidRequest(field, "is no answer_id: take it from the lost stream's first chunk")
        key, part = match[1], int(match[2])
        if not hmac.compare_digest(key[_DRAWN:], self._signature(key[:_DRAWN], tenant, request)):
            return None
        is_old = self._clock() - int(key[:_TIME], 16) > MOST_AGE_S
        return None if is_old else AnswerId(key, part + 1)

    def is_paid(self, answer_id: AnswerId) -> bool:
        """Whether another part may be made of what the first one was charged: not for ever, as who has an
        answer could ask for it again and again."""
        return answer_id.part > 0 and self._times.get(answer_id.key, 0) < MOST_TIMES

    def taken_up(self, answer_id: AnswerId) -> None:
        """This part of it begins here."""
        if answer_id.part:
            self._times[answer_id.key] = self._times.pop(answer_id.key, 0) + 1
            if len(self._times) > MOST_KEPT:
                self._times.popitem(last=False)

    def _signature(self, drawn: str, tenant: str, request: inference_pb2.GenerateRequest) -> str:
        """Signature of what stays the same when the request is sent again, as far as quotas are about it."""
        most_tokens = request.stopping.max_new_tokens if request.stopping.HasField("max_new_tokens") else None
        signed = [drawn, tenant, request.request_id, request.adapter, _prompt_size(request), most_tokens]
        return hmac.digest(self._secret, json.dumps(signed).encode(), "sha256").hex()[:_DRAWN]


def _prompt_size(request: inference_pb2.GenerateRequest) -> int:
    match request.WhichOneof("prompt"):
        case "text":
            return len(request.text)
        case "token_ids":
            return len(request.token_ids.ids)
        case _:
            return request.chat.ByteSize()
