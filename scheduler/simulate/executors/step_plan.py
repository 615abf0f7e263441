"""What one step of a simulated executor has in it. Pure."""

from dataclasses import dataclass, field

from scheduler.simulate.executors.sequence import Sequence


@dataclass(slots=True)
class StepPlan:
    """`prompts` have so many tokens in it, each of `decoding` sequences has one; `drawing` of the prompts are
    done with it. `page_ins` are (slot, digest, evicted)."""

    step: int
    decoding: int = 0
    kv_tokens: int = 0  # Places in the KV cache of those that decode, with it.
    prompts: dict[Sequence, int] = field(default_factory=dict)
    drawing: list[Sequence] = field(default_factory=list)
    page_ins: list[tuple[int, str, str]] = field(default_factory=list)
    slot_hits: int = 0
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return sum(self.prompts.values())

    @property
    def is_empty(self) -> bool:
        return not self.decoding and not self.prompts
