"""Times of sampling 64 rows of Llama 3's vocabulary, greedily and in several other ways."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from executor.batch.sampling import Row, SampleRequest, SamplingParams
from executor.step.sampler import Sampler

ROWS, VOCAB = 64, 128_256
ROUNDS = 30
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy, 5 logprobs": {"temperature": 0, "logprobs": 5},
    "temperature": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "penalties over 1000 tokens": {"repetition_penalty": 1.1, "frequency_penalty": 0.1},
}


@dataclass(frozen=True, slots=True)
class Result:
    """`device_us` on the device, `host_us` in the engine's thread; the two overlap."""

    part: str
    way: str
    device_us: float
    host_us: float


def run() -> Iterator[dict[str, object]]:
    sampler, logits = Sampler(ROWS, "cuda"), torch.randn(ROWS, VOCAB, device="cuda") * 3
    sampler.warm_up(VOCAB)
    history = tuple(range(0, 2000, 2))
    for way, params in WAYS.items():
        rows: list[Row] = [
            SampleRequest(SamplingParams(**params, seed=i), 1000 + i, (), history) for i in range(ROWS)
        ]
        host, device = [], []
        for _ in range(ROUNDS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda._sleep(5_000_000)  # type: ignore[no-untyped-call]  # the host gets ahead
            begin.record()
            started = time.perf_counter()
            drawn = sampler.launch(logits, rows)
            host.append((time.perf_counter() - started) * 1e6)
            end.record()
            sampler.collect(drawn)
            device.append(begin.elapsed_time(end) * 1e3)
        yield asdict(Result("sampling", way, median(device), median(host)))
