"""What steps, page-ins and loads take on one kind of card, read from a file of fitted coefficients."""

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

DEFAULT = "llama-3.1-8b-h200"
FEW_TOKENS = 256
FEW_SEQUENCES = 64

_Cost = TypeVar("_Cost")


class UnknownCosts(ValueError):
    """There is no such file of coefficients, or a field of it is missing or is none that is known."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: `base_s`, and so much for each of what is in it.

    few_sequence_s  of each of the first `FEW_SEQUENCES` that decode
    sequence_s      of each further one
    kv_token_s      of a place in the KV cache that those that decode read
    mixed_s         once, where a step has tokens of prompts
    few_token_s     of each of the first `FEW_TOKENS` of these, for which the weights are read anyway
    prompt_token_s  of each further one
    lora_s          once, where a step has adapters
    rank_s          of a rank of each adapter in it
    lora_token_s    of a token of a prompt besides, where a step has adapters
    slot_s          of each slot of the executor, where a step has adapters
    """

    base_s: float
    few_sequence_s: float
    sequence_s: float
    kv_token_s: float
    mixed_s: float
    few_token_s: float
    prompt_token_s: float
    lora_s: float
    rank_s: float
    lora_token_s: float
    slot_s: float

    def seconds(self, decoding: int, kv_tokens: int, prompt_tokens: int, used_rank: int, slots: int) -> float:
        """`used_rank`: the ranks of all adapters that are used, together; 0 where none is."""
        seconds = self.base_s + self.kv_token_s * kv_tokens
        few = min(decoding, FEW_SEQUENCES)
        seconds += self.few_sequence_s * few + self.sequence_s * (decoding - few)
        if prompt_tokens:
            few = min(prompt_tokens, FEW_TOKENS)
            seconds += self.mixed_s + self.few_token_s * few + self.prompt_token_s * (prompt_tokens - few)
        if used_rank:
            seconds += self.lora_s + self.slot_s * slots
            seconds += self.rank_s * used_rank + self.lora_token_s * prompt_tokens
        return seconds


@dataclass(frozen=True, slots=True)
class BytesCost:
    """Seconds of bringing an adapter from one place to another."""

    fixed_s: float
    byte_s: float

    def seconds(self, num_bytes: int) -> float:
        return self.fixed_s + self.byte_s * num_bytes


@dataclass(frozen=True, slots=True)
class LoadCost:
    """Into host memory, from the store and from the local disk, while all loader threads are busy."""

    store: BytesCost
    disk: BytesCost


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of one card and model. `page_in` is from host memory into a slot, `link_s` one way between a
    client and an executor, through the scheduler; steps are planned `steps_ahead`. Steps with prompts are
    filled up to `captured_rows`; one of more rows takes `launch_s` at least."""

    card: str
    model: str
    step: StepCost
    load: LoadCost
    page_in: BytesCost
    rank_bytes: int  # Of an adapter, for each of its ranks.
    link_s: float
    launch_s: float
    captured_rows: tuple[int, ...]
    steps_ahead: int
    quiet_steps: float = 1.25  # executor/batch/pace.py tells of these.
    bound_steps: float = 2.5
    spread_steps: int = 3
    crowd_steps: int = 12
    crowd: int = 8
    crowd_bounds: int = 12
    least_tokens: int = 32

    def seconds(self, decoding: int, kv_tokens: int, prompt_tokens: int, used_rank: int, slots: int) -> float:
        """The seconds of a step; see `StepCost.seconds`."""
        if not prompt_tokens:
            return self.step.seconds(decoding, kv_tokens, 0, used_rank, slots)
        rows = decoding + prompt_tokens
        filled = self.size_for(rows)
        seconds = self.step.seconds(decoding, kv_tokens, filled - decoding, used_rank, slots)
        return seconds if rows <= self.captured_rows[-1] else max(seconds, self.launch_s)

    def prompt_tokens_within(self, limit_s: float, decode_s: float, used_rank: int) -> int:
        """The tokens of prompts that a step may have to take so long at most, beside those that decode: a
        step with these alone takes `decode_s`."""
        step = self.step
        lora_s = step.lora_token_s if used_rank else 0.0
        left_s = limit_s - decode_s - step.mixed_s
        few = min(float(FEW_TOKENS), left_s / (step.few_token_s + lora_s))
        left_s -= few * (step.few_token_s + lora_s)
        return max(0, int(few + left_s / (step.prompt_token_s + lora_s)))

    def size_for(self, rows: int) -> int:
        """The smallest captured size for so many rows; the rows where there is none."""
        at = bisect_left(self.captured_rows, rows)
        return self.captured_rows[at] if at < len(self.captured_rows) else rows


def read_costs(name: str = DEFAULT) -> Costs:
    """The coefficients of that name, or of that file. Raises UnknownCosts."""
    try:
        if name.endswith(".json"):
            text = Path(name).read_text(encoding="utf-8")
        else:
            text = (
                resources.files("scheduler.simulate.coefficients").joinpath(f"{name}.json").read_text("utf-8")
            )
        return _costs(json.loads(text)["costs"])
    except OSError as error:
        raise UnknownCosts(f"coefficients {name!r} cannot be read: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise UnknownCosts(f"coefficients {name!r} are not whole: {error!r}") from None


def _costs(found: Mapping[str, Any]) -> Costs:
    load = {kind: _made(BytesCost, found["load"][kind]) for kind in ("store", "disk")}
    parts = {
        "step": _made(StepCost, found["step"]),
        "load": LoadCost(**load),
        "page_in": _made(BytesCost, found["page_in"]),
        "captured_rows": tuple(found["captured_rows"]),
    }
    return _made(Costs, {**found, **parts})


def _made(kind: type[_Cost], found: Mapping[str, Any]) -> _Cost:
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if unknown := found.keys() - known:
        raise ValueError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
    return kind(**found)
