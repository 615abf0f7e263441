"""What is measured of answers when their usage is recorded, and of the ledger itself."""

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge

from lorafleet.usage.record import Record

KINDS = ("prompt", "cached_prompt", "output")


@dataclass(frozen=True, slots=True)
class _Counters:
    answers: Counter
    tokens: tuple[Counter, Counter, Counter]  # By KINDS.


class LedgerMetrics:
    """A part of `scheduler.metrics.Metrics`, counted from the records, with or without a ledger of them."""

    def __init__(self, registry: CollectorRegistry, tenant_label: Callable[[str], str]) -> None:
        """`tenant_label` bounds how many tenants have series of their own."""
        self._tenant_label = tenant_label
        self._answers = Counter(
            "lorafleet_scheduler_answers",
            "Answers, or parts of them, that ended here, by tenant and outcome: how they ended well (STOP, "
            "LENGTH, TIME_LIMIT), or a gRPC code.",
            ["tenant", "outcome"],
            registry=registry,
        )
        self._tokens = Counter(
            "lorafleet_scheduler_answer_tokens",
            "Tokens of those answers by kind (prompt, cached_prompt, output: only what this part of them "
            "brought), tenant and outcome.",
            ["kind", "tenant", "outcome"],
            registry=registry,
        )
        self._known: dict[tuple[str, str], _Counters] = {}  # By tenant's label and outcome.
        self.unwritten_records = Gauge(
            "lorafleet_scheduler_ledger_unwritten_records",
            "Usage records that are in memory, as their file cannot be written. Above 0, new requests are "
            "refused.",
            registry=registry,
        )
        self.lost_records = Counter(
            "lorafleet_scheduler_ledger_lost_records",
            "Usage records that were dropped, as too many waited for their file, or it could not be written "
            "until the end. The log has them.",
            registry=registry,
        )
        self.unshipped_seconds = Gauge(
            "lorafleet_scheduler_ledger_unshipped_seconds",
            "How long ago all usage records that there were had been shipped to Redis.",
            registry=registry,
        )

    def ended(self, record: Record) -> None:
        labels = self._tenant_label(record.tenant), record.outcome
        counters = self._known.get(labels) or self._look_up(labels)
        counters.answers.inc()
        amounts = (record.prompt, record.cached, record.output - record.resumed)
        for counter, amount in zip(counters.tokens, amounts, strict=True):
            counter.inc(amount)

    def _look_up(self, labels: tuple[str, str]) -> _Counters:
        """Once: that takes longer than counting."""
        prompt, cached, output = (self._tokens.labels(kind, *labels) for kind in KINDS)
        counters = self._known[labels] = _Counters(self._answers.labels(*labels), (prompt, cached, output))
        return counters
