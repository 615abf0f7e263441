"""What a request asks of an executor. Pure."""

from typing import NamedTuple

from scheduler.fleet.state import Limits

ANY_LENGTH = 1 << 62
"""Stands for lengths above what any executor has said that it takes."""


class Needs(NamedTuple):
    """Requests of one version with equal needs may run on the same executors."""

    max_rank: int = 0  # What a slot must be able to hold; 0 for the base model.
    modules: frozenset[str] = frozenset()
    full_heads: int = 0
    max_length: int = 0  # Tokens of prompt and answer, rounded up to what some executor takes at most.
    refused: frozenset[str] = frozenset()  # Names of executors that can never serve it.
    masked: bool = False  # What may be drawn is restricted, which an older executor would ignore.

    def fit(self, limits: Limits) -> bool:
        """Whether an executor with such limits can run it, busy or not, if it does not refuse it."""
        fits_slot = limits.can_hold(self.max_rank, self.modules, self.full_heads)
        knows = limits.knows_constraints or not self.masked
        return fits_slot and knows and self.max_length <= limits.max_model_len
