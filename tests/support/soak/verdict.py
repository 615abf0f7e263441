"""Whether what a fleet holds stays flat: the last quarter of a soak is held against its second one."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tests.support.soak.watch import Sample

GROWTH, GROWTH_MB = 0.03, 8.0  # What may be added: of memory to the median, of counts to the most.
SWING = 2  # By which a count may be above all that was seen before.
# Seconds for which what nobody needs any more is kept: its number grows until then.
KEPT_S = {"redis keys operation": 600.0}
BOUNDED = ("threads", "descriptors", "series", "processes", "clients", "keys")


@dataclass(frozen=True)
class Flat:
    """One value: medians, least and most of the second and of the last quarter, and its slope in between.

    per_hour: the median of the slopes of all pairs of samples from the second quarter on (Theil and Sen).
    """

    what: str
    second: float
    last: float
    second_range: tuple[float, float]
    last_range: tuple[float, float]
    per_hour: float
    is_flat: bool


def flatness(samples: Sequence[Sample]) -> list[Flat]:
    """Of all values that both quarters have; the first quarter warms up."""
    ends = samples[-1].at_s
    names = sorted({name for each in samples for name in each.values})
    found = [_flat(name, samples, ends) for name in names]
    return [each for each in found if each is not None]


def _flat(what: str, samples: Sequence[Sample], ends: float) -> Flat | None:
    warm = max(ends / 4, KEPT_S.get(what, 0.0))
    second = _of(what, [each for each in samples if warm <= each.at_s < max(ends / 2, warm + ends / 10)])
    last = _of(what, [each for each in samples if each.at_s >= ends * 3 / 4])
    if not second or not last:
        return None
    before, after = median(second), median(last)
    is_flat = True
    if what.endswith("_mb"):
        is_flat = after <= before * (1 + GROWTH) + GROWTH_MB
    elif any(kind in what for kind in BOUNDED):
        is_flat = after <= max(second) * (1 + GROWTH) + SWING
    per_hour = slope(what, [each for each in samples if each.at_s >= warm])
    return Flat(what, round(before, 2), round(after, 2), _range(second), _range(last), per_hour, is_flat)


def _range(values: Sequence[float]) -> tuple[float, float]:
    return round(min(values), 2), round(max(values), 2)


def slope(name: str, samples: Sequence[Sample], most: int = 120) -> float:
    """The median of all slopes of pairs, an hour; of `most` samples, evenly."""
    points = [(each.at_s, each.values[name]) for each in samples if name in each.values]
    points = points[:: max(1, len(points) // most)]
    slopes = [
        (after - before) / (later - at) * 3600
        for number, (at, before) in enumerate(points)
        for later, after in points[number + 1 :]
    ]
    return round(median(slopes), 2) if slopes else 0.0


def not_back(before: Sample, after: Sample, kinds: Sequence[str], slack: float = 0.0) -> list[str]:
    """What of `kinds` is more at rest than it was at rest before, by more than `slack`."""
    return [
        f"not back: {name}: {before.values.get(name, 0.0):g}, then {value:g}"
        for name, value in sorted(after.values.items())
        if any(kind in name for kind in kinds) and value > before.values.get(name, 0.0) + slack
    ]


def _of(name: str, samples: Sequence[Sample]) -> list[float]:
    return [each.values[name] for each in samples if name in each.values]
