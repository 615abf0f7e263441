"""All Prometheus metrics of the executor.

Counters are fed by the engine; its gauges are read from its last status at scrape time. The series of an
adapter end when its last copy goes.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from executor.adapters.residency import Copy, Tier
from executor.batch.batcher import StepPlan
from executor.events import EngineInfo, Status

PREFIX = "lorafleet_executor_"
STEP_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
PAGE_IN_BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
LOAD_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60)


class Metrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._steps = Counter(PREFIX + "steps", "Forward passes.", registry=registry)
        self._step_seconds = Histogram(
            PREFIX + "step_seconds", "Time of a step.", buckets=STEP_BUCKETS, registry=registry
        )
        self._tokens = Counter(PREFIX + "tokens", "Tokens computed, by kind.", ["kind"], registry=registry)
        self._refused_at_door = Counter(
            PREFIX + "refused_at_door",
            "Calls refused before any work for them: bytes that are no message, too large, too slow or too "
            "many; by reason.",
            ["reason"],
            registry=registry,
        )
        self._preemptions = Counter(
            PREFIX + "preemptions", "Sequences sent back to wait for KV blocks.", registry=registry
        )
        self._prefix_queries = Counter(
            PREFIX + "prefix_cache_query_tokens", "Tokens looked up in the prefix cache.", registry=registry
        )
        self._prefix_hits = Counter(
            PREFIX + "prefix_cache_hit_tokens", "Tokens found in the prefix cache.", registry=registry
        )
        self._page_ins = Counter(PREFIX + "page_ins", "Adapters copied into a slot.", registry=registry)
        self._page_in_seconds = Histogram(
            PREFIX + "page_in_seconds",
            "Time to copy an adapter from host memory into a slot.",
            buckets=PAGE_IN_BUCKETS,
            registry=registry,
        )
        self._slot_hits = Counter(
            PREFIX + "slot_hits", "Sequences that started on an adapter in a slot.", registry=registry
        )
        self._page_ins_of = Counter(
            PREFIX + "adapter_page_ins", "Copies into a slot, by adapter.", ["digest"], registry=registry
        )
        self._slot_hits_of = Counter(
            PREFIX + "adapter_slot_hits",
            "Sequences that started in a slot, by adapter.",
            ["digest"],
            registry=registry,
        )
        self._loads = Counter(
            PREFIX + "adapter_loads",
            "Adapters read from the store, by result.",
            ["result"],
            registry=registry,
        )
        self._load_seconds = Histogram(
            PREFIX + "adapter_load_seconds",
            "Time from store to host memory.",
            buckets=LOAD_BUCKETS,
            registry=registry,
        )
        self._dispatches = Counter(
            PREFIX + "dispatches", "Dispatches ended, by outcome.", ["outcome"], registry=registry
        )
        self._certificate_expiry = Gauge(
            PREFIX + "certificate_expiry_timestamp_seconds",
            "When the certificates that are in use end, by the flag of their file: the first of a chain, the "
            "last of several CAs.",
            ["file"],
            registry=registry,
        )

    def follow_certificate(self, file: str, end: Callable[[], float]) -> None:
        """`file`: its flag. `end`, in unix seconds, is asked whenever the metrics are read."""
        self._certificate_expiry.labels(file).set_function(end)

    def refused_at_door(self, reason: str) -> None:
        self._refused_at_door.labels(reason).inc()

    def step_done(self, plan: StepPlan, generated: int, seconds: float) -> None:
        self._steps.inc()
        self._step_seconds.observe(seconds)
        self._tokens.labels("computed").inc(sum(plan.num_tokens.values()))
        self._tokens.labels("generated").inc(generated)
        self._preemptions.inc(len(plan.preempted))
        self._slot_hits.inc(len(plan.slot_hits))
        for digest in plan.slot_hits:
            self._slot_hits_of.labels(digest).inc()
        self._prefix_queries.inc(plan.looked_up)
        self._prefix_hits.inc(plan.cached)

    def paged_in(self, digest: str) -> None:
        self._page_ins.inc()
        self._page_ins_of.labels(digest).inc()

    def page_in_took(self, seconds: float) -> None:
        self._page_in_seconds.observe(seconds)

    def adapter_gone(self, digest: str) -> None:
        """No tier has a copy any more: its series end."""
        for counter in (self._page_ins_of, self._slot_hits_of):
            counter.remove(digest)

    def dispatch_ended(self, outcome: str) -> None:
        self._dispatches.labels(outcome).inc()

    def load_ended(self, result: str, seconds: float) -> None:
        self._loads.labels(result).inc()
        self._load_seconds.observe(seconds)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the gauges show."""

    info: EngineInfo
    status: Status
    copies: tuple[Copy, ...]
    names: Callable[[str], Iterable[str]]  # those of a version, by its digest


class StateCollector(Collector):
    """Gauges over `read()`, which is None until the engine is ready; called on the scraping thread."""

    def __init__(self, read: Callable[[], Snapshot | None], clock: Callable[[], float]) -> None:
        self._read = read
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        snapshot = self._read()
        if snapshot is not None:
            yield from _totals(snapshot)
            yield from _by_adapter(snapshot)
            yield from _for_pickers(snapshot, self._clock())


def _totals(snapshot: Snapshot) -> Iterator[Metric]:
    info, status = snapshot.info, snapshot.status
    resident = sum(copy.tier is Tier.SLOT for copy in snapshot.copies)
    disk_bytes = sum(copy.num_bytes for copy in snapshot.copies if copy.tier is Tier.DISK)
    for name, text, value in (
        ("running_sequences", "Sequences that run.", status.running),
        ("waiting_sequences", "Accepted sequences before their first step.", status.waiting),
        ("free_seats", "Room for more sequences.", status.free_seats),
        ("kv_blocks", "KV blocks in all.", info.num_kv_blocks),
        ("free_kv_blocks", "KV blocks free or evictable.", status.free_kv_blocks),
        ("slots", "Slots in all.", info.max_loras),
        ("slots_resident", "Slots that hold an adapter.", resident),
        ("slots_in_use", "Slots with running sequences.", status.slots_in_use),
        ("host_tier_bytes", "Adapter bytes in host memory.", status.host_bytes),
        ("disk_tier_bytes", "Adapter bytes in the cache on disk.", disk_bytes),
        ("loads_in_flight", "Adapters on their way from the store.", status.loading),
        ("draining", "1 while no new dispatch is taken.", status.draining),
    ):
        yield GaugeMetricFamily(PREFIX + name, text, value=value)


def _by_adapter(snapshot: Snapshot) -> Iterator[Metric]:
    """Bounded by what is in memory or has accepted sequences; residency does not depend on traffic."""
    resident = GaugeMetricFamily(
        PREFIX + "adapter_resident", "1 for every copy in memory, by tier.", labels=["digest", "tier"]
    )
    for copy in (copy for copy in snapshot.copies if copy.tier is not Tier.DISK):
        resident.add_metric([copy.digest, copy.tier.value], 1)
    yield resident
    sequences = GaugeMetricFamily(
        PREFIX + "adapter_sequences", "Accepted sequences, by adapter.", labels=["digest", "state"]
    )
    for state, counts in (
        ("running", snapshot.status.running_by_digest),
        ("waiting", snapshot.status.waiting_by_digest),
    ):
        for digest, count in counts:
            sequences.add_metric([digest, state], count)
    yield sequences


def _for_pickers(snapshot: Snapshot, now: float) -> Iterator[Metric]:
    """The names that gateways' endpoint pickers read, with vLLM's meaning.

    Pickers take running_lora_adapters for "is loaded there": it lists every adapter in a slot, busy or not,
    by the names under which it was asked for, since pickers compare them with those in requests.
    """
    info, status = snapshot.info, snapshot.status
    usage = 1 - status.free_kv_blocks / info.num_kv_blocks
    for name, text, value in (
        ("num_requests_running", "Sequences that run.", status.running),
        ("num_requests_waiting", "Sequences that wait.", status.waiting),
        ("gpu_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", usage),
        ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", usage),
    ):
        gauge = GaugeMetricFamily("vllm:" + name, text, labels=["model_name"])
        gauge.add_metric([info.model_name], value)
        yield gauge
    adapters = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "When this was read, unix seconds; the labels tell the rest.",
        labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
    )
    in_slots = _names(snapshot, (copy.digest for copy in snapshot.copies if copy.tier is Tier.SLOT))
    waiting = _names(snapshot, (digest for digest, _ in status.waiting_by_digest))
    adapters.add_metric([str(info.max_loras), in_slots, waiting], now)
    yield adapters


def _names(snapshot: Snapshot, digests: Iterable[str]) -> str:
    return ",".join(sorted({name for digest in digests for name in snapshot.names(digest)}))
