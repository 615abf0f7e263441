"""Tells metrics, forecasts and logs of every turn in a request's life."""

import logging
from collections.abc import Mapping

from scheduler.dispatch.forecasts import Forecasts
from scheduler.dispatch.live_request import LiveRequest
from scheduler.fleet.residency import BASE, Tier
from scheduler.metrics import Metrics

logger = logging.getLogger(__name__)


class Journal:
    """Told of every turn in a request's life, in order; `now` is on the clock of `live.accepted_at`."""

    def __init__(self, metrics: Metrics, forecasts: Forecasts) -> None:
        self._metrics = metrics
        self._forecasts = forecasts

    def accepted(self, live: LiveRequest, num_live: int) -> None:
        admitted = live.admitted
        self._metrics.live_requests.set(num_live)
        if admitted.digest:
            self._metrics.version_served(admitted.adapter, admitted.digest)
        self._metrics.accepted(live.waiting.tenant, admitted.adapter, len(admitted.prompt_token_ids))

    def dispatched(self, live: LiveRequest, now: float, tier: Tier) -> None:
        """`live.attempts` counts this one; `tier` is where the closest copy of its version was."""
        self._metrics.dispatches.inc()
        if live.waiting.digest != BASE:
            self._metrics.sent_to_copy(tier)
        if live.attempts == 1:
            self._forecasts.left(live)
            self._metrics.queue_seconds.observe(now - live.accepted_at)
        elif live.last_token_at is not None:
            self._metrics.resumptions.inc()

    def first_token(self, live: LiveRequest, now: float) -> None:
        self._metrics.first_token_seconds.observe(now - live.accepted_at)
        self._forecasts.first_token(live, now)

    def step(self, tokens: Mapping[tuple[str, str, str], int], gaps: Mapping[float, int]) -> None:
        """What a step of an executor made, by tenant, adapter and digest, and how many answers had waited so
        many seconds for it: mostly all of them alike."""
        for (tenant, adapter, _), count in tokens.items():
            self._metrics.generated(tenant, adapter, count)
        for gap, count in gaps.items():
            self._metrics.inter_token_seconds.observe(gap, count)

    def attempt_failed(self, live: LiveRequest, reason: str, why: str) -> None:
        self._metrics.attempt_failed(reason)
        logger.warning("attempt failed: %s: %s", reason, why, extra={"request_id": live.admitted.request_id})

    def ended(self, live: LiveRequest, code: str, num_live: int, now: float) -> None:
        """`code` is the name of a gRPC status."""
        self._metrics.live_requests.set(num_live)
        self._metrics.ended(code)
        self._forecasts.ended(live, code, now)
        if code == "OK":
            self._metrics.answered(now - live.accepted_at, live.completion_tokens)
        self._metrics.cached(live.waiting.tenant, live.admitted.adapter, live.cached_prompt_tokens)
        logger.info("ended: %s", code, extra=_fields(live))


def _fields(live: LiveRequest) -> dict[str, object]:
    return {
        "request_id": live.admitted.request_id,
        "tenant": live.waiting.tenant,
        "adapter": live.admitted.adapter,
        "digest": live.admitted.digest,
        "prompt_tokens": len(live.admitted.prompt_token_ids),
        "completion_tokens": live.completion_tokens,
        "attempts": live.attempts,
    }
