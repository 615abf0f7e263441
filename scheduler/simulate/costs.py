"""What steps, page-ins and loads take on one kind of card, read from a file of fitted coefficients."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

DEFAULT = "llama-3.1-8b-h200"

_Cost = TypeVar("_Cost")


class UnknownCosts(ValueError):
    """There is no such file of coefficients, or a field of it is missing or is none that is known."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: `base_s`, and so much for each of what is in it.

    sequence_s      of one that decodes
    kv_token_s      of a place in the KV cache that those that decode read
    mixed_s         once, where a step has tokens of prompts
    prompt_token_s  of one of these
    lora_s          once, where a step has adapters
    rank_s          of a rank of each adapter in it
    lora_token_s    of a token of a prompt, beside `prompt_token_s`, where a step has adapters
    """

    base_s: float
    sequence_s: float
    kv_token_s: float
    mixed_s: float
    prompt_token_s: float
    lora_s: float
    rank_s: float
    lora_token_s: float

    def seconds(self, decoding: int, kv_tokens: int, prompt_tokens: int, used_rank: int) -> float:
        """`used_rank`: the ranks of all adapters that are used, together; 0 where none is."""
        seconds = self.base_s + self.sequence_s * decoding + self.kv_token_s * kv_tokens
        if prompt_tokens:
            seconds += self.mixed_s + self.prompt_token_s * prompt_tokens
        if used_rank:
            seconds += self.lora_s + self.rank_s * used_rank + self.lora_token_s * prompt_tokens
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
    """Of one card and model. `page_in` is from host memory into a slot, `link_s` one way between a client and
    an executor, through the scheduler; steps are planned `steps_ahead`."""

    card: str
    model: str
    step: StepCost
    load: LoadCost
    page_in: BytesCost
    rank_bytes: int  # Of an adapter, for each of its ranks.
    link_s: float
    steps_ahead: int
    quiet_steps: float = 1.25  # executor/batch/pace.py tells of these.
    bound_steps: float = 2.5
    spread_steps: int = 3
    crowd_steps: int = 12
    crowd: int = 8
    crowd_bounds: int = 12
    least_tokens: int = 32


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
    }
    return _made(Costs, {**found, **parts})


def _made(kind: type[_Cost], found: Mapping[str, Any]) -> _Cost:
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if unknown := found.keys() - known:
        raise ValueError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
    return kind(**found)
