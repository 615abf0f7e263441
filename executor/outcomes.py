"""What became of dispatches in a heartbeat, until it is told: tokens, ends, rejections."""

import logging

from executor.batch.sequence import Dispatch, FinishReason, Sequence
from executor.events import Finished, NewToken, Rejected
from executor.metrics import Metrics
from executor.rejection import Rejection

logger = logging.getLogger(__name__)


class Outcomes:
    """Ends and rejections are counted and logged at once."""

    def __init__(self, metrics: Metrics) -> None:
        self.tokens: list[NewToken] = []
        self._finished: list[Finished] = []
        self._rejected: list[Rejected] = []
        self._metrics = metrics

    def finished(self, sequence: Sequence, reason: FinishReason) -> None:
        dispatch = sequence.dispatch
        self._finished.append(Finished(dispatch.key, reason, sequence.cached_prompt_tokens))
        self._metrics.dispatch_ended(reason.value)
        logger.debug(
            "finished: %s after %d tokens", reason.value, sequence.num_outputs, extra=_names(dispatch)
        )

    def rejected(self, dispatch: Dispatch, rejection: Rejection) -> None:
        self._rejected.append(Rejected(dispatch.key, rejection))
        self._metrics.dispatch_ended("rejected")
        logger.info("rejected: %s: %s", rejection.reason, rejection.message, extra=_names(dispatch))

    def take(self) -> tuple[tuple[NewToken, ...], tuple[Finished, ...], tuple[Rejected, ...]]:
        """All since the last call."""
        taken = (tuple(self.tokens), tuple(self._finished), tuple(self._rejected))
        self.tokens, self._finished, self._rejected = [], [], []
        return taken


def _names(dispatch: Dispatch) -> dict[str, str]:
    return {
        "request_id": dispatch.request_id,
        "dispatch_id": dispatch.key[1],
        "digest": dispatch.digest or "base",
    }
