"""Host time of a step: describing it, and one eager add_lora_linear with all checks."""

import random
import time
from collections.abc import Callable, Iterable
from itertools import cycle
from statistics import median
from typing import Any

import numpy as np
import torch

from kernels.bench.inputs import LAYERS, MAX_LORAS, Layer, WeightSet
from kernels.metadata.meta import LoRAMapping
from kernels.metadata.work_list import Ints, Run
from kernels.punica_gpu import PunicaWrapperGPU


def run() -> list[dict[str, Any]]:
    """Rows (op, case, us of a call on its own, us of one of 20 that follow each other)."""
    slots = [index % MAX_LORAS for index in range(256)]
    random.Random(0).shuffle(slots)
    decode = tuple((slot, 1) for slot in slots)
    prefill = tuple((slot, 128) for slot in range(MAX_LORAS))
    last_rows = tuple((slot, 1) for slot in range(MAX_LORAS))
    punica = PunicaWrapperGPU(MAX_LORAS, 8192, "cuda")
    rows = []
    for kind, form in (("pairs", tuple), ("an array", _array)):
        for name, runs, prompt in (
            ("256 shuffled rows", decode, decode),
            ("8192 rows in 64 runs", prefill, last_rows),
        ):
            mapping = LoRAMapping(form(list(runs)), form(list(prompt)))
            other = LoRAMapping(form(runs[::-1]), form(prompt[::-1]))
            case = f"update_metadata, {name} as {kind}"
            rows.append(_row(case, _update(punica, mapping, other)))
            rows.append(_row(f"{case}, unchanged", _update(punica, mapping)))
    for layer in LAYERS[1:3]:
        rows.append(_row(f"add_lora_linear, {layer.name}, 64 rows", _linear(punica, layer)))
    return rows


def _array(runs: Iterable[Run]) -> Ints:
    return np.array(list(runs), dtype=np.int32)


def _row(case: str, call: Callable[[], None]) -> dict[str, Any]:
    return {"op": "host_cost", "case": case, "host_us": _host_us(call, 1), "one_of_20_us": _host_us(call, 20)}


def _update(punica: PunicaWrapperGPU, *mappings: LoRAMapping) -> Callable[[], None]:
    """The mappings in turns: a step like the last one costs much less."""
    turns = cycle(mappings)
    return lambda: punica.update_metadata(next(turns))


def _linear(punica: PunicaWrapperGPU, layer: Layer) -> Callable[[], None]:
    punica.update_metadata(LoRAMapping(tuple((slot, 1) for slot in range(MAX_LORAS)), ()))
    weights = WeightSet.random(layer, 16)
    slices = len(layer.slices)
    ranks = torch.full((slices, MAX_LORAS), 16, dtype=torch.int32, device="cuda")
    scales = torch.ones(slices, MAX_LORAS, device="cuda")
    x = torch.randn(64, layer.width, device="cuda", dtype=torch.bfloat16)
    y = torch.zeros(64, layer.columns, device="cuda", dtype=torch.bfloat16)
    starts = [sum(layer.slices[:index]) for index in range(slices)]
    return lambda: punica.add_lora_linear(y, x, weights.lora_a, weights.lora_b, ranks, scales, starts)


def _host_us(call: Callable[[], None], calls: int, rounds: int = 50) -> float:
    """Median over rounds that each begin with an idle device."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) * 1e6 / calls)
    return median(times)
