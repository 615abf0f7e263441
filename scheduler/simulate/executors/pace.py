"""How many tokens the next step of a simulated executor may have, as executor/batch/pace.py says.

That follows measured times of steps; here they are known.
"""

from bisect import bisect_right
from math import ceil

from scheduler.simulate.costs import Costs


class Pace:
    def __init__(self, costs: Costs, slots: int) -> None:
        self._costs = costs
        self._slots = slots
        self._crowded = False

    def most_tokens(
        self, decoding: int, kv_tokens: int, prompts: int, prompt_tokens: int, used_rank: int
    ) -> int | None:
        """`prompts` sequences that could be in the step need so many tokens of prompts. None: no bound."""
        costs = self._costs
        if not decoding or not prompts:
            return None
        decode_s = costs.seconds(decoding, kv_tokens, 0, used_rank, self._slots)
        bound_s = costs.bound_steps * decode_s

        def within(limit_s: float) -> int:
            """Rows of the largest step with prompts that takes so long at most."""
            return self._floor(decoding + costs.prompt_tokens_within(limit_s, decode_s, used_rank))

        def rows_for(tokens: float) -> int:
            return costs.size_for(decoding + ceil(tokens))

        self._crowded = prompts >= (costs.crowd if self._crowded else max(costs.crowd, decoding))
        of_crowd = prompt_tokens / (1 if self._crowded else costs.crowd_steps)
        return max(
            rows_for(costs.least_tokens),
            within(costs.quiet_steps * decode_s),
            min(rows_for(prompt_tokens / costs.spread_steps), within(bound_s)),
            min(rows_for(of_crowd), within(costs.crowd_bounds * bound_s)),
        )

    def _floor(self, rows: int) -> int:
        """The largest captured size of at most so many rows; the rows where they are more than any."""
        captured = self._costs.captured_rows
        if rows > captured[-1]:
            return rows
        at = bisect_right(captured, rows)
        return captured[at - 1] if at else 0
