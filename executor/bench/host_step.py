"""What a step of decoding costs the engine's thread, around a model that costs nothing."""

import time
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from executor.adapters.pager import Listeners, Pager, PagerSettings
from executor.adapters.pooled import PooledImage
from executor.batch.batcher import Batcher
from executor.batch.blocks import BlockPool
from executor.batch.pace import Pace, StepTimes
from executor.batch.rates import RateMeter
from executor.batch.sampling import SamplingParams
from executor.batch.sequence import Dispatch, StopLimits, StopRules
from executor.batch.slots import SlotTable
from executor.engine import Engine
from executor.events import EngineInfo
from executor.guides.guide import Vocabulary
from executor.guides.guides import Guides
from executor.guides.workshop import Workshop
from executor.lora.arena import TensorCopy
from executor.lora.image import SlotImage
from executor.metrics import Metrics
from executor.step.inputs import SequenceRows
from executor.step.model_runner import ModelRunner, NoOtherRanks
from executor.step.sampler import Sampler
from executor.step.token_masks import MaskBuffers
from executor.step.trace import NO_TRACE, Trace

VOCAB, LENGTH, PROMPT, STEPS = 128_256, 2048, 64, 100


@dataclass(frozen=True, slots=True)
class Result:
    """`us` of a beat: the host's time, or the sampler's on the device where that is longer."""

    part: str
    sequences: int
    sampling: str
    us: float


class NoModel:
    """The same logits whatever the rows are."""

    def __init__(self, most: int) -> None:
        self._logits = torch.randn(most, VOCAB, device="cuda")

    def warm_up(self) -> None:
        pass

    def close(self) -> None:
        pass

    def run(
        self, sequences: Sequence[SequenceRows], last_tokens: Tensor | None = None, trace: Trace = NO_TRACE
    ) -> Tensor:
        return self._logits[: sum(len(sequence.logit_rows) for sequence in sequences)]


class NoAdapters:
    nbytes_per_slot = max_images = 1

    def slot_nbytes(self, num_full_heads: int) -> int:
        return self.nbytes_per_slot

    def load_image(self, digest: str) -> PooledImage:
        raise RuntimeError("there are no adapters here")

    def load(self, slot: int, image: PooledImage) -> None: ...
    def clear(self, slot: int) -> None: ...
    def load_seconds(self) -> list[float]:
        return []

    def forget(self, image: PooledImage) -> None: ...
    def make_room(self, keep: Container[str], evict: Callable[[], bool]) -> None: ...
    def close(self) -> None: ...


class NoWriter:
    def load(self, slot: int, image: SlotImage, extra: Sequence[TensorCopy] = ()) -> None: ...
    def clear(self, slot: int, extra: Sequence[TensorCopy] = ()) -> None: ...
    def load_seconds(self) -> list[float]:
        return []

    def before_step(self, slots: Collection[int]) -> None: ...
    def after_step(self, slots: Collection[int]) -> None: ...


def run() -> Iterator[dict[str, object]]:
    for count in (1, 64, 256):
        for name, params in (("greedy", SamplingParams(temperature=0)), ("temperature", SamplingParams())):
            yield asdict(Result("host_step", count, name, _measure(count, params)))


def _measure(count: int, params: SamplingParams) -> float:
    engine = _engine(count)
    for number in range(count):
        rules = StopRules(ignore_eos=True)
        engine.add(Dispatch((0, str(number)), "", "", tuple(range(PROMPT)), (), params, rules))
    times = []
    for _ in range(STEPS + 20):
        started = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - started) * 1e6)
    engine.close()
    return median(times[20:])


def _engine(count: int) -> Engine:
    slots, sampler = SlotTable(1), Sampler(count, "cuda")
    sampler.warm_up(VOCAB)
    limits, metrics = StopLimits(frozenset({0}), LENGTH), Metrics(CollectorRegistry())
    pager: Pager[PooledImage] = Pager(
        NoAdapters(),
        slots,
        PagerSettings(host_bytes=1, loader_threads=1, load_timeout_s=60.0),
        Listeners(_nothing, lambda result, seconds: None, lambda digest: None, lambda seconds: None),
    )
    batcher = Batcher(
        BlockPool(count * LENGTH // 16, 16),
        slots,
        max_batched_tokens=max(8192, count),
        max_seats=count,
        max_page_ins=1,
        aging_s=1.0,
    )
    return Engine(
        EngineInfo("", "", "", LENGTH, 1, (), 1, count, batcher.blocks.num_blocks, 16),
        ModelRunner(NoModel(count), sampler, NoWriter(), limits, NoOtherRanks()),
        batcher,
        pager,
        Guides(
            Workshop(None, Vocabulary(VOCAB, limits.eos_token_ids), _nothing),
            MaskBuffers(count, VOCAB, "cuda"),
        ),
        limits,
        VOCAB,
        metrics,
        time.monotonic,
        Pace(StepTimes((), batcher.max_batched_tokens), batcher.max_batched_tokens, None),
        RateMeter(),
        steps_ahead=1,
    )


def _nothing() -> None:
    """Nobody waits to be woken."""
