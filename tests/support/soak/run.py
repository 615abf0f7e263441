"""One soak from the first rest to the last: guests, operators, the breaker and the watch, all at once."""

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

from lorafleet import calls
from tests.support.chaos.run import together
from tests.support.soak.breaker import Breaker
from tests.support.soak.fleet import Fleet
from tests.support.soak.guests import Guest
from tests.support.soak.operators import Operator
from tests.support.soak.verdict import flatness, not_back
from tests.support.soak.watch import Sample, Watch

EVERY_S = 5.0
# Each client has connections of its own, as if it were another process.
APART = (("grpc.use_local_subchannel_pool", 1),)
PATIENCE_S = 180.0
RUSH = 40
# Threads or descriptors of what may have been made since the warm-up, as processes for templates.
MADE_ONCE = 30
LASTING = ("scheduler-0", "executor-0")  # They are never restarted.
SERIES = 40  # Samples of each value in the report.
IN_LOGS = ("Traceback", "internal error", "Task exception", "never awaited")


@dataclass(frozen=True)
class Soaked:
    """seconds: of the traffic. before, after: what was held at rest, before it and when it had ended."""

    seconds: float
    before: Sample
    after: Sample
    samples: list[Sample]


def soak(fleet: Fleet, seconds: float, seed: int = 1) -> Soaked:
    """A warm-up comes first, without the breaker."""
    with patch.object(calls, "CHANNEL_OPTIONS", (*calls.CHANNEL_OPTIONS, *APART)):
        return _soak(fleet, seconds, seed)


def _soak(fleet: Fleet, seconds: float, seed: int) -> Soaked:
    fleet.learn(fleet.size.warm_s)
    _traffic(fleet, seed, None)
    watch = Watch(fleet, EVERY_S)
    before = watch.look()
    for tenant in fleet.tenants:
        tenant.ends_at = time.monotonic() + seconds
    watching = threading.Thread(target=watch.run, daemon=True)
    watching.start()
    began = time.monotonic()
    breaker = Breaker(fleet, seed, fleet.size.breaker_pause_s, began + seconds)
    _traffic(fleet, seed + 1, breaker.run)
    watch.stop.set()
    watching.join()
    Guest(fleet.tenants[0], seed, pause_s=0.05, deaf_s=0.0).rush(RUSH)
    fleet.wait_idle()
    return Soaked(round(time.monotonic() - began, 1), before, watch.look(), watch.samples)


def _traffic(fleet: Fleet, seed: int, breaker: Callable[[], None] | None) -> None:
    """Until the tenants' time is over and everything is given back."""
    size = fleet.size
    runs: list[Callable[[], None]] = [] if breaker is None else [breaker]
    operators: list[Operator] = []
    for number, tenant in enumerate(fleet.tenants):
        own, deaf_s = seed * 1000 + number * 100, size.deaf_s if breaker else 0.0
        runs += [Guest(tenant, own + n, size.guest_pause_s, deaf_s).run for n in range(size.guests)]
        operators.append(Operator(tenant, fleet.folder / f"variants-{seed}", own, size.operator_pause_s))
    together([*runs, *(each.run for each in operators)], PATIENCE_S, fleet.tenants[0])
    for operator in operators:
        operator.clear()
    fleet.wait_idle()


def report(fleet: Fleet, soaked: Soaked) -> dict[str, Any]:
    """All that is to be known of it; `faults` must be empty."""
    causes, flat = fleet.causes, flatness(soaked.samples)
    answers = {tenant.tenant: dict(tenant.outcomes) for tenant in fleet.tenants}
    return {
        "size": asdict(fleet.size),
        "seconds": soaked.seconds,
        "faults": faults(fleet, soaked) + [f"not flat: {each}" for each in flat if not each.is_flat],
        "answers": answers,
        "done": dict(sorted(causes.done.items())),
        "errors_asked_for": dict(causes.expected),
        "errors_injected": dict(causes.injected),
        "errors_not_injected": causes.not_injected,
        "at_rest": {
            name: [round(soaked.before.values.get(name, 0.0), 2), round(value, 2)]
            for name, value in soaked.after.values.items()
        },
        "flatness": [asdict(each) for each in flat],
        "series": [
            {"at_s": each.at_s, **{name: round(value, 1) for name, value in each.values.items()}}
            for each in soaked.samples[:: max(1, len(soaked.samples) // SERIES)]
        ],
    }


def faults(fleet: Fleet, soaked: Soaked) -> list[str]:
    """What must not be, however short a soak was."""
    found = [f"not injected: {error}" for error in fleet.causes.not_injected]
    found += [f"wrong: {problem}" for tenant in fleet.tenants for problem in tenant.problems]
    kinds = ("spool", "redis keys blob", "redis keys chunk", "redis keys push", "live_requests")
    found += not_back(soaked.before, soaked.after, kinds)
    counts = [f"{name} {what}" for name in LASTING for what in ("threads", "descriptors")]
    found += not_back(soaked.before, soaked.after, counts, MADE_ONCE)
    found += [f"left: {each}" for each in fleet.left()]
    for node in fleet.nodes:
        log = node.log()
        found += [f"the log of {node.name} has {word!r}" for word in IN_LOGS if word in log]
    return found
