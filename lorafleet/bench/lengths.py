"""How many tokens prompts and answers have."""

from dataclasses import dataclass
from random import Random

from lorafleet.bench.errors import BenchError

FORMS = "N, uniform:LOW:HIGH or normal:MEAN:STD"


@dataclass(frozen=True, slots=True)
class Lengths:
    """kind: "fixed" (first = n), "uniform" (first to second, inclusive), "normal" (mean, std; at least 1)."""

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """From FORMS. Raises BenchError."""
        kind, *numbers = text.split(":") if ":" in text else ("fixed", text)
        try:
            lengths = cls(kind, *map(float, numbers))
        except (ValueError, TypeError):
            raise BenchError(f"length {text!r} is not {FORMS}") from None
        if (kind, len(numbers)) not in (("fixed", 1), ("uniform", 2), ("normal", 2)):
            raise BenchError(f"length {text!r} is not {FORMS}")
        if lengths.first < 1 or (kind == "uniform" and lengths.second < lengths.first) or lengths.second < 0:
            raise BenchError(f"length {text!r} must be at least 1, in ascending order")
        return lengths

    def draw(self, rng: Random) -> int:
        """One length, at least 1."""
        if self.kind == "uniform":
            return rng.randint(round(self.first), round(self.second))
        if self.kind == "normal":
            return max(1, round(rng.gauss(self.first, self.second)))
        return round(self.first)
