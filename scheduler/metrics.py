"""All Prometheus metrics of the scheduler."""

import contextlib
from collections import Counter as Counted
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from scheduler.estimate_metrics import EstimateMetrics
from scheduler.fleet.residency import Tier
from scheduler.fleet.state import CLOSED, Phase
from scheduler.ledger.metrics import LedgerMetrics
from scheduler.loop_histogram import LoopHistogram
from scheduler.member_gauge import MemberGauge

OTHER = "other"
LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_BUCKETS = tuple(4**power for power in range(9))


class BoundedLabel:
    """The first `limit` names keep their own label value, all later ones share "other".

    Only names of admitted requests come here: a name that a client made up is never a label.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._names: set[str] = set()

    def forget(self, name: str) -> None:
        """Another may have its place."""
        self._names.discard(name)

    def __call__(self, name: str) -> str:
        if name in self._names:
            return name
        if len(self._names) >= self._limit:
            return OTHER
        self._names.add(name)
        return name


@dataclass(frozen=True, slots=True)
class _Counters:
    """The counters of one tenant and adapter."""

    accepted: Counter
    prompt_tokens: Counter
    generated_tokens: Counter


class Metrics:
    """Registered once in `registry`. `max_label_values` bounds tenant and adapter labels, each."""

    def __init__(self, registry: CollectorRegistry, max_label_values: int = 100) -> None:
        self.tenant = BoundedLabel(max_label_values)
        self.adapter = BoundedLabel(max_label_values)
        self._version = BoundedLabel(max_label_values)
        self.estimates = EstimateMetrics(registry)
        self.ledger = LedgerMetrics(registry, self.tenant)
        self._accepted = Counter(
            "lorafleet_scheduler_accepted_requests",
            "Requests accepted, by tenant and adapter.",
            ["tenant", "adapter"],
            registry=registry,
        )
        self._ended = Counter(
            "lorafleet_scheduler_requests", "Requests that ended, by gRPC code.", ["code"], registry=registry
        )
        self._tokens = Counter(
            "lorafleet_scheduler_tokens",
            "Tokens by kind (prompt, cached_prompt, generated), tenant and adapter.",
            ["kind", "tenant", "adapter"],
            registry=registry,
        )
        self._counters: dict[tuple[str, str], _Counters] = {}  # of the two above, by tenant and adapter
        self._served: dict[str, set[str]] = {}  # by adapters with a label of their own: digests, not gone
        self._refused_at_door = Counter(
            "lorafleet_scheduler_refused_at_door",
            "Calls refused before any work for them: no identity, bytes that are no message, too large, too "
            "slow or too many; by reason.",
            ["reason"],
            registry=registry,
        )
        self.dispatches = Counter(
            "lorafleet_scheduler_dispatches", "Attempts sent to executors.", registry=registry
        )
        self._failed_attempts = Counter(
            "lorafleet_scheduler_failed_attempts",
            "Attempts that ended early and whose requests went back to the queue, by reason.",
            ["reason"],
            registry=registry,
        )
        self._poison = Counter(
            "lorafleet_scheduler_poison_requests",
            "Requests that ended since they crashed executors, the last one alone there, by how that one was "
            "lost: crashed, or hung.",
            ["cause"],
            registry=registry,
        )
        for cause in ("crashed", "hung"):
            self._poison.labels(cause)  # An alert on its increase needs the 0.
        self.resumptions = Counter(
            "lorafleet_scheduler_resumptions",
            "Attempts that went on after tokens of an earlier one.",
            registry=registry,
        )
        self.prefetch_hints = Counter(
            "lorafleet_scheduler_prefetch_hints", "Prefetch hints sent to executors.", registry=registry
        )
        self._version_requests = Counter(
            "lorafleet_scheduler_version_requests",
            "Requests accepted, by adapter and the version that its ref named.",
            ["adapter", "version"],
            registry=registry,
        )
        self._resolutions = Counter(
            "lorafleet_scheduler_resolutions",
            "Refs resolved, by where the answer came from (memory, store, memory_unconfirmed).",
            ["source"],
            registry=registry,
        )
        self.store_age_seconds = Gauge(
            "lorafleet_scheduler_store_age_seconds",
            "Time since what is known of the adapter store was last confirmed to be current.",
            registry=registry,
        )
        self.store_refuses_changes = Gauge(
            "lorafleet_scheduler_store_refuses_changes",
            "1 while the adapter store takes no changes, as its server may lose what is stored.",
            registry=registry,
        )
        self.known_names = Gauge(
            "lorafleet_scheduler_known_names", "Adapters whose records are in memory.", registry=registry
        )
        self._data_loss = Counter(
            "lorafleet_scheduler_data_loss",
            "Stored versions that were found damaged. Above 0: look at once.",
            registry=registry,
        )
        self._refusals = Counter(
            "lorafleet_scheduler_refusals",
            "Calls refused for who made them or for what they would take, by status, reason (what was wrong, "
            "the right that was missing, the limit) and method.",
            ["code", "reason", "method"],
            registry=registry,
        )
        self._copy_hits = Counter(
            "lorafleet_scheduler_copy_hits",
            "Requests sent to executors, by the closest copy of their version there.",
            ["tier"],
            registry=registry,
        )
        self.live_requests = Gauge(
            "lorafleet_scheduler_live_requests", "Accepted requests that have not ended.", registry=registry
        )
        self.queue_length = Gauge(
            "lorafleet_scheduler_queue_requests", "Requests that wait.", registry=registry
        )
        self.groups = Gauge(
            "lorafleet_scheduler_queue_groups", "Adapter versions that requests wait for.", registry=registry
        )
        self.passed_over = Gauge(
            "lorafleet_scheduler_passed_over_versions",
            "Versions that have waited for a slot for longer than --aging, and for which one is freed.",
            registry=registry,
        )
        self._oldest_wait = Gauge(
            "lorafleet_scheduler_oldest_wait_seconds",
            "How long the longest waits last by what is missing: a slot for the version, a seat, an executor "
            "that is ready.",
            ["reason"],
            registry=registry,
        )
        self._discovery_failures = Counter(
            "lorafleet_scheduler_discovery_failures",
            "Times that a name or a file could not tell who the executors are, by its flag; what it told "
            "before is kept.",
            ["source"],
            registry=registry,
        )
        self._executors = Gauge(
            "lorafleet_scheduler_executors",
            "Executors by state; those that are ready, and cordoned, leaving or tripped, count as that only.",
            ["state"],
            registry=registry,
        )
        self.missing_pins = MemberGauge(
            "lorafleet_scheduler_missing_pins",
            "Versions that were pinned through this scheduler and that an executor does not keep.",
            registry,
        )
        self._certificate_expiry = Gauge(
            "lorafleet_scheduler_certificate_expiry_timestamp_seconds",
            "When the certificates that are in use end, by the flag of their file: the first of a chain, the "
            "last of several CAs.",
            ["file"],
            registry=registry,
        )
        self.loop_lag_seconds = Histogram(
            "lorafleet_scheduler_loop_lag_seconds",
            "How late the event loop came to its heartbeat, at 20 beats a second while it keeps up.",
            buckets=(0.001, 0.0025, *LATENCY_BUCKETS),
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "lorafleet_scheduler_queue_seconds",
            "Time from the acceptance of a request to its first dispatch.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.first_token_seconds = Histogram(
            "lorafleet_scheduler_first_token_seconds",
            "Time from the acceptance of a request to its first token.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.inter_token_seconds = LoopHistogram(
            "lorafleet_scheduler_inter_token_seconds",
            "Time between the arrivals of a request's tokens.",
            LATENCY_BUCKETS,
            registry,
        )
        self.chunk_tokens = LoopHistogram(
            "lorafleet_scheduler_chunk_tokens",
            "Tokens in a chunk of a stream: more than one where they were held back, or the client was slow.",
            TOKEN_BUCKETS,
            registry,
        )
        self._request_seconds = Histogram(
            "lorafleet_scheduler_request_seconds",
            "Time from the acceptance of a request to its end, of those that ended with OK.",
            buckets=(*LATENCY_BUCKETS, 300.0, 600.0),
            registry=registry,
        )
        self._prompt_lengths = Histogram(
            "lorafleet_scheduler_request_prompt_tokens",
            "Prompt tokens of an accepted request.",
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )
        self._answer_lengths = Histogram(
            "lorafleet_scheduler_request_generated_tokens",
            "Generated tokens of a request that ended with OK.",
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )

    def refused_at_door(self, reason: str) -> None:
        self._refused_at_door.labels(reason).inc()

    def resolved(self, source: str) -> None:
        self._resolutions.labels(source).inc()

    def data_loss(self) -> None:
        self._data_loss.inc()

    def sent_to_copy(self, tier: Tier) -> None:
        self._copy_hits.labels(tier.name.lower()).inc()

    def version_served(self, adapter: str, digest: str) -> None:
        """Bounded as all labels are; `version_gone` ends it and makes room, and for the adapter with the last
        of its versions that were served."""
        version = OTHER
        if self.adapter(adapter) == adapter:
            self._served.setdefault(adapter, set()).add(digest)
            version = self._version(f"{adapter}@{digest}")
        name, _, shown = version.partition("@")
        self._version_requests.labels(name, shown or OTHER).inc()

    def served_versions(self) -> list[tuple[str, str]]:
        """Adapters with series of their own, and their versions that are not known to be gone."""
        return [(adapter, digest) for adapter, digests in self._served.items() for digest in digests]

    def version_gone(self, adapter: str, digest: str) -> None:
        with contextlib.suppress(KeyError):
            self._version_requests.remove(adapter, digest)
        self._version.forget(f"{adapter}@{digest}")
        served = self._served.get(adapter, set())
        if served == {digest}:
            self._end_adapter(adapter)
        served.discard(digest)

    def _end_adapter(self, adapter: str) -> None:
        del self._served[adapter]
        for labels in [labels for labels in self._counters if labels[1] == adapter]:
            del self._counters[labels]
            self._accepted.remove(*labels)
            for kind in ("prompt", "cached_prompt", "generated"):
                with contextlib.suppress(KeyError):
                    self._tokens.remove(kind, *labels)
        self.adapter.forget(adapter)

    def accepted(self, tenant: str, adapter: str, prompt_tokens: int) -> None:
        counters = self._counters_of(tenant, adapter)
        counters.accepted.inc()
        counters.prompt_tokens.inc(prompt_tokens)
        self._prompt_lengths.observe(prompt_tokens)

    def generated(self, tenant: str, adapter: str, tokens: int) -> None:
        """Called once a step for all tokens of a tenant's adapter."""
        self._counters_of(tenant, adapter).generated_tokens.inc(tokens)

    def cached(self, tenant: str, adapter: str, tokens: int) -> None:
        self._tokens.labels("cached_prompt", *self._names(tenant, adapter)).inc(tokens)

    def ended(self, code: str) -> None:
        """Every request, also one that was refused: "OK" or the name of its gRPC code."""
        self._ended.labels(code).inc()

    def answered(self, seconds: float, tokens: int) -> None:
        """Each that ended with OK, from its acceptance on."""
        self._request_seconds.observe(seconds)
        self._answer_lengths.observe(tokens)

    def attempt_failed(self, reason: str) -> None:
        """`reason` comes from executors and from us, never from clients."""
        self._failed_attempts.labels(reason).inc()

    def poison(self, phase: Phase) -> None:
        """A request crashed executors; `phase` is that of the last one."""
        self._poison.labels("hung" if phase is Phase.HUNG else "crashed").inc()

    def oldest_waits(self, seconds: Mapping[str, float]) -> None:
        """The waits by reason: "slot", "seat" or "executor"."""
        for reason, longest in seconds.items():
            self._oldest_wait.labels(reason).set(longest)

    def refused(self, code: str, reason: str, method: str) -> None:
        self._refusals.labels(code, reason, method).inc()

    def executors(self, conditions: Iterable[str]) -> None:
        counts = Counted(conditions)
        for condition in (*CLOSED, *(phase.name.lower() for phase in Phase)):
            self._executors.labels(condition).set(counts[condition])

    def follow_discovery(self, flags: Iterable[str]) -> None:
        """An alert on an increase needs the 0."""
        for flag in flags:
            self._discovery_failures.labels(flag)

    def discovery_failed(self, flag: str) -> None:
        self._discovery_failures.labels(flag).inc()

    def follow_certificate(self, file: str, end: Callable[[], float]) -> None:
        """`file`: its flag. `end`, in unix seconds, is asked whenever the metrics are read, on a thread of
        theirs."""
        self._certificate_expiry.labels(file).set_function(end)

    def _counters_of(self, tenant: str, adapter: str) -> _Counters:
        """Looked up by their labels once: that takes longer than counting."""
        labels = self._names(tenant, adapter)
        counters = self._counters.get(labels)
        if counters is None:
            counters = self._counters[labels] = _Counters(
                self._accepted.labels(*labels),
                self._tokens.labels("prompt", *labels),
                self._tokens.labels("generated", *labels),
            )
        return counters

    def _names(self, tenant: str, adapter: str) -> tuple[str, str]:
        return self.tenant(tenant), self.adapter(adapter)
