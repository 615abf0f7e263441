"""How many tokens the next step of a simulated executor may have, as executor/batch/pace.py says.

That follows measured times of steps; here they are known.
"""

from math import ceil

from scheduler.simulate.costs import Costs


class Pace:
    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._crowded = False

    def most_tokens(
        self, decoding: int, kv_tokens: int, prompts: int, prompt_tokens: int, used_rank: int
    ) -> int | None:
        """`prompts` sequences that could be in the step need so many tokens of prompts. None: no bound."""
        costs = self._costs
        if not decoding or not prompts:
            return None
        decode_s = costs.step.seconds(decoding, kv_tokens, 0, used_rank)
        token_s = costs.step.prompt_token_s + (costs.step.lora_token_s if used_rank else 0.0)
        spare_s = decode_s + costs.step.mixed_s

        def within(bound_s: float) -> int:
            return max(0, int((bound_s - spare_s) / token_s))

        bound_s = costs.bound_steps * decode_s
        self._crowded = prompts >= (costs.crowd if self._crowded else max(costs.crowd, decoding))
        of_crowd = prompt_tokens / (1 if self._crowded else costs.crowd_steps)
        tokens = max(
            costs.least_tokens,
            within(costs.quiet_steps * decode_s),
            min(ceil(prompt_tokens / costs.spread_steps), within(bound_s)),
            min(ceil(of_crowd), within(costs.crowd_bounds * bound_s)),
        )
        return decoding + tokens
