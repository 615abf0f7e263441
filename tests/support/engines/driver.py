"""A real engine on a tiny model, driven step by step in the test's own thread."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from adapter_store import WeightsSource
from executor.batch.sampling import SamplingParams
from executor.batch.sequence import Dispatch, FinishReason, Key, StopRules
from executor.build import build_engine
from executor.config import ExecutorConfig
from executor.engine import Engine
from executor.events import NewToken, StepEvents
from executor.metrics import Metrics
from executor.rejection import Rejection

PROMPTS = [list(range(start, start + length)) for start, length in ((3, 20), (40, 5), (9, 33), (70, 11))]
MODES = {"in turn": "false", "ahead": "true"}  # of async scheduling
# For a module whose tests all hold whether steps are planned in turn or one ahead.
in_both_modes = pytest.mark.parametrize("make_engine", MODES.values(), ids=MODES.keys(), indirect=True)
SMALL: dict[str, Any] = {
    "store": "unused",
    "max_loras": 2,
    "max_lora_rank": 16,
    "max_seats": 16,
    "max_batched_tokens": 64,
    "num_kv_blocks": 64,
    "block_size": 8,
    "max_step_ms": 0,  # sizes that follow measured times would differ from run to run
    "host_memory_bytes": 64 << 20,
    "loader_processes": 0,  # they would open another store than the engine that a test makes
}


def greedy(
    name: str,
    prompt: Iterable[int],
    *,
    digest: str = "",
    max_new_tokens: int = 16,
    logprobs: int | None = None,
    **fields: Any,
) -> Dispatch:
    """A dispatch without randomness that does not stop at the end token; `fields` are Dispatch's."""
    dispatch = Dispatch(
        key=(0, name),
        request_id=f"request-{name}",
        digest=digest,
        prompt_token_ids=tuple(prompt),
        output_token_ids=(),
        sampling=SamplingParams(temperature=0, logprobs=logprobs),
        stop=StopRules(max_new_tokens=max_new_tokens, ignore_eos=True),
    )
    return replace(dispatch, **fields)


@dataclass
class Driver:
    """Collects what an engine tells, and checks its books after every step."""

    engine: Engine
    registry: CollectorRegistry
    tokens: dict[Key, list[NewToken]] = field(default_factory=dict)
    finished: dict[Key, FinishReason] = field(default_factory=dict)
    cached: dict[Key, int] = field(default_factory=dict)
    rejected: dict[Key, Rejection] = field(default_factory=dict)

    def step(self) -> StepEvents:
        events = self.engine.step()
        self.take(events)
        return events

    def take(self, events: StepEvents) -> None:
        self.engine.check()
        for token in events.tokens:
            self.tokens.setdefault(token.key, []).append(token)
        for end in events.finished:
            assert end.key not in self.finished
            self.finished[end.key] = end.reason
            self.cached[end.key] = end.cached_prompt_tokens
        for refused in events.rejected:
            self.rejected[refused.key] = refused.rejection

    def until(self, done: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            if not self.step().ran:
                time.sleep(0.001)  # only loads are under way
            assert time.monotonic() < deadline, "the engine does not get there"

    def run(self, *dispatches: Dispatch) -> list[list[int]]:
        """Adds all at once and steps until each has ended; returns their tokens."""
        for dispatch in dispatches:
            self.engine.add(dispatch)
        keys = [dispatch.key for dispatch in dispatches]
        self.until(lambda: all(key in self.finished or key in self.rejected for key in keys))
        assert not self.rejected, self.rejected
        return [self.token_ids(key) for key in keys]

    def token_ids(self, key: Key) -> list[int]:
        tokens = self.tokens.get(key, [])
        if tokens:
            first = tokens[0].output_index
            assert [t.output_index for t in tokens] == list(range(first, first + len(tokens)))
        return [token.token.token_id for token in tokens]

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"lorafleet_executor_{name}", labels) or 0.0


def make_driver(
    model: str, adapters: WeightsSource, *, clock: Callable[[], float] = time.monotonic, **settings: Any
) -> Driver:
    registry = CollectorRegistry()
    config = ExecutorConfig(model=model, **(SMALL | settings))
    return Driver(build_engine(config, adapters, metrics=Metrics(registry), clock=clock), registry)
