"""An accepted request's place in the usage ledger: whatever ends it, that is recorded once."""

import time

from lorafleet.usage.record import Record
from lorafleet.v1 import common_pb2
from scheduler.dispatch.live_request import LiveRequest
from scheduler.ledger.answer_id import AnswerId
from scheduler.ledger.ledger import Ledger

_OUTCOMES = {
    common_pb2.FINISH_REASON_STOP: "STOP",
    common_pb2.FINISH_REASON_LENGTH: "LENGTH",
    common_pb2.FINISH_REASON_TIME_LIMIT: "TIME_LIMIT",
}


class LedgerEntry:
    """The first end that it is told of counts."""

    def __init__(self, ledger: Ledger, answer_id: AnswerId, live: LiveRequest) -> None:
        self.answer_id, self.live = answer_id, live
        self._ledger = ledger
        self._ended = False

    def finish(self, reason: common_pb2.FinishReason) -> None:
        """To be told before the client is."""
        self.end(_OUTCOMES[reason])

    def end(self, outcome: str) -> None:
        """`outcome` as in Record."""
        if self._ended:
            return
        self._ended = True
        live, admitted = self.live, self.live.admitted
        record = Record(
            key=self.answer_id.key,
            part=self.answer_id.part,
            time=round(time.time(), 3),
            tenant=admitted.identity.tenant,
            adapter=admitted.adapter,
            digest=admitted.digest,
            prompt=len(admitted.prompt_token_ids),
            cached=live.cached_prompt_tokens,
            output=live.completion_tokens,
            resumed=len(admitted.resumed_token_ids),
            outcome=outcome,
        )
        self._ledger.record(record)
