"""What runs before an executor is ready covers what the kernels' tuning can ask for in a step that is not
captured."""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch

from executor.gpu.graph_plans import MOST_MIXED_ROWS, head_runs, step_runs
from executor.gpu.warm_up import StepLimits, warm_up_steps
from executor.layers.attention import KVCache, LayerCache
from executor.step.inputs import check
from kernels.launching import moe_tuning
from kernels.launching.follower_tuning import (
    add_rms_norm_config,
    beside_pays,
    best_form,
    rope_config,
    silu_mul_config,
)
from kernels.launching.moe_tuning import block_size, gemm_block_size
from kernels.launching.tuning import expand_config, shrink_config
from kernels.lora_expand_fp8 import expand_config_fp8
from kernels.lora_linear_fp8 import pair_expand_config_fp8
from kernels.lora_shrink_fp8 import shrink_config_fp8
from kernels.metadata.launch_plan import LaunchPlan
from kernels.metadata.meta import LoRAKernelMeta, LoRAMapping
from kernels.moe_lora_align import listed_slots, num_slots
from kernels.punica import PunicaWrapperCPU
from tests.support.engines.random_steps import random_ranks, random_runs

LIMITS = StepLimits(max_rows=8192, max_sequences=64, max_model_len=2048, max_loras=64, max_rank=64)
# Inputs and slices of each layer of Llama-3.1-8B, by what follows it.
LAYERS = {"rope": (3, 4096), "silu_mul": (2, 4096), "add_rms_norm": (1, 4096), "down": (1, 14336)}
Forms = set[tuple[object, ...]]
HEAD = {"head": (1, 4096)}


class Experts(NamedTuple):
    number: int
    topk: int
    hidden: int
    intermediate: int


# As in Mixtral, Qwen3-30B-A3B, Qwen2-57B-A14B, gpt-oss-120b, and one of each token alone.
EXPERTS = [
    Experts(8, 2, 4096, 14336),
    Experts(128, 8, 2048, 768),
    Experts(64, 8, 3584, 2560),
    Experts(128, 4, 2880, 2880),
    Experts(16, 1, 1024, 2048),
]
RANKS = ([8] * 64, [16] * 64, [32] * 64, [64] * 64, [64] + [8] * 63, [4, 64] * 32)
CACHE = KVCache((LayerCache(torch.zeros(2, 1, 16, 1, 2), None),), 0, 16)


def forms(plan: LaunchPlan, *, scaled: bool) -> Forms:
    """What is compiled for a step of this plan; `scaled`: by DoRA's factors, which come between a pair and
    what follows."""
    found: Forms = set()
    for name, (slices, width) in LAYERS.items():
        follower = "add_rms_norm" if name == "down" else name
        way = "pair" if scaled else best_form(plan, follower)  # type: ignore[arg-type]
        beside = way == "beside" or (way == "pair" and beside_pays(plan))
        shrink = shrink_config(plan, slices, width, 2, final=beside)
        found.add((name, "shrink", shrink, plan.parts))
        if way == "pair":
            splits = 1 if shrink.final else shrink.split
            found.add((name, "expand", expand_config(plan, 2), plan.parts, splits))
            continue
        configs = {
            "rope": lambda: rope_config(plan, 128),
            "silu_mul": lambda: silu_mul_config(plan, 2),
            "add_rms_norm": lambda: add_rms_norm_config(plan, 4096, 2),
        }
        found.add((name, "fused", configs[follower](), 1 if shrink.final else shrink.split))
    return found


def fp8_forms(plan: LaunchPlan, layers: Mapping[str, tuple[int, int]] = LAYERS) -> Forms:
    """The same for FP8 slots: always pairs, whose kernels find an item's parts in the step itself; and what
    the embedding's adapters add."""
    found: Forms = {("embed_tokens", "expand", expand_config_fp8(plan))} if layers is LAYERS else set()
    for name, (slices, width) in layers.items():
        shrink = shrink_config_fp8(plan, slices, width, 2)
        found.add((name, "shrink", shrink))
        found.add((name, "expand", pair_expand_config_fp8(plan), 1 if shrink.final else shrink.split))
    return found


def head_forms(plan: LaunchPlan) -> Forms:
    """For the rows that reach the head: a pair, whatever the step is."""
    shrink = shrink_config(plan, *HEAD["head"], 2)
    expand = expand_config(plan, 2)
    return {
        ("shrink", shrink, plan.parts),
        ("expand", expand, plan.parts, 1 if shrink.final else shrink.split),
    }


def expert_forms(meta: LoRAKernelMeta, experts: Experts, max_rank: int) -> Forms:
    """Of a layer of experts, its base products and what aligns their pairs among them."""
    pairs = meta.num_rows * experts.topk
    found: Forms = {("base", gemm_block_size(pairs, experts.number)), ("counted", pairs > 1024)}
    if meta.plan.items:
        size = block_size(meta, experts.topk, experts.number)
        blocks = pairs
        if size > 1:
            found.add(("aligned", pairs > 1024, listed_slots(num_slots(meta), meta.max_loras)))
            blocks = min(pairs, num_slots(meta) * experts.number + pairs // size)
        block_rank = min(meta.plan.block_rank, max(8, max_rank))
        for name, slices, width in (("w13", 2, experts.hidden), ("w2", 1, experts.intermediate)):
            chosen = moe_tuning.choose(size, blocks, slices, width, max_rank, block_rank, 2)
            found.add((name, size, chosen))
    return found


def run_before(
    limits: StepLimits, punica: PunicaWrapperCPU, meta: LoRAKernelMeta, forms: Callable[[LaunchPlan], Forms]
) -> Forms:
    """What has run once an executor is ready, of the layers or of the head by the meta."""
    found = Forms()
    for _ in described(limits, punica, experts=False):
        found |= forms(meta.plan) if meta.plan.items else set()
    return found


def described(limits: StepLimits, punica: PunicaWrapperCPU, *, experts: bool) -> Iterator[None]:
    """The steps before an executor is ready: each as the metas have it."""
    for step in warm_up_steps(limits, CACHE, experts=experts):
        sequences = step.sequences
        assert sum(len(sequence.token_ids) for sequence in sequences) <= limits.max_rows
        assert sum(len(sequence.logit_rows) for sequence in sequences) <= limits.max_sequences
        assert len(sequences) <= limits.warm_up_sequences
        punica.update_metadata(LoRAMapping(step_runs(sequences), head_runs(sequences)), step.plan, step.plan)
        yield


of_layers = pytest.mark.parametrize(
    "forms",
    [partial(forms, scaled=False), partial(forms, scaled=True), fp8_forms],
    ids=["plain", "scaled", "fp8"],
)
of_head = pytest.mark.parametrize(
    "forms", [head_forms, partial(fp8_forms, layers=HEAD)], ids=["plain", "fp8"]
)


@pytest.mark.parametrize(
    ("max_loras", "max_rank"), [(1, 64), (2, 256), (3, 4), (8, 64), (16, 64), (64, 16), (512, 256)]
)
@pytest.mark.parametrize("max_rows", [700, 2048, 8192])
@of_layers
def test_every_form_of_a_random_step_has_run(
    forms: Callable[[LaunchPlan], Forms], max_rows: int, max_loras: int, max_rank: int
) -> None:
    limits = replace(LIMITS, max_rows=max_rows, max_loras=max_loras, max_rank=max_rank)
    punica, rng = PunicaWrapperCPU(max_loras, max_rows), random.Random(0)
    meta = punica.token_mapping_meta
    warm = run_before(limits, punica, meta, forms)
    for runs in itertools.islice(random_runs(rng, max_loras, max_rows, MOST_MIXED_ROWS + 1), 600):
        random_ranks(rng, punica, max_rank)
        punica.update_metadata(LoRAMapping(tuple(runs), ()))
        missing = forms(meta.plan) - warm
        assert not missing, (runs, meta.plan, missing)


@pytest.mark.parametrize(("max_loras", "max_rank"), [(1, 64), (8, 16), (64, 16), (512, 64)])
@pytest.mark.parametrize("max_rows", [700, 2048, 8192])
@pytest.mark.parametrize("experts", EXPERTS)
def test_every_form_of_a_random_steps_experts_has_run(
    experts: Experts, max_rows: int, max_loras: int, max_rank: int
) -> None:
    limits = replace(LIMITS, max_rows=max_rows, max_loras=max_loras, max_rank=max_rank)
    punica, rng = PunicaWrapperCPU(max_loras, max_rows), random.Random(0)
    meta = punica.token_mapping_meta
    warm = Forms()
    for _ in described(limits, punica, experts=True):
        warm |= expert_forms(meta, experts, max_rank)
    for runs in itertools.islice(random_runs(rng, max_loras, max_rows, MOST_MIXED_ROWS + 1), 300):
        random_ranks(rng, punica, max_rank)
        punica.update_metadata(LoRAMapping(tuple(runs), ()))
        missing = expert_forms(meta, experts, max_rank) - warm
        assert not missing, (runs, meta.plan, missing)


@pytest.mark.parametrize(("max_loras", "max_sequences"), [(1, 16), (8, 64), (16, 256), (512, 256)])
@of_head
def test_every_form_of_random_rows_at_the_head_has_run(
    forms: Callable[[LaunchPlan], Forms], max_loras: int, max_sequences: int
) -> None:
    limits = replace(LIMITS, max_loras=max_loras, max_sequences=max_sequences)
    punica, rng = PunicaWrapperCPU(max_loras, LIMITS.max_rows), random.Random(0)
    meta = punica.prompt_mapping_meta
    warm = run_before(limits, punica, meta, forms)
    for runs in itertools.islice(random_runs(rng, max_loras, max_sequences, 1), 600):
        random_ranks(rng, punica, LIMITS.max_rank)
        punica.update_metadata(LoRAMapping((), tuple(runs)))
        missing = forms(meta.plan) - warm
        assert not missing, (runs, meta.plan, missing)


@pytest.mark.parametrize("max_loras", [16, 64, 512])
@pytest.mark.parametrize("max_rows", [2048, 4096, 8192])
@of_layers
def test_every_form_of_an_eager_step_has_run(
    forms: Callable[[LaunchPlan], Forms], max_rows: int, max_loras: int
) -> None:
    limits = replace(LIMITS, max_rows=max_rows, max_loras=max_loras)
    punica = PunicaWrapperCPU(max_loras, max_rows)
    meta = punica.token_mapping_meta
    warm = run_before(limits, punica, meta, forms)
    for ranks in RANKS:
        for slot in range(max_loras):
            punica.set_slot_rank(slot, ranks[slot % len(ranks)])
        counts = itertools.product((1, 2, 8, 9, 20, 33, 64, 128), (1, 2, 7, 17, 64, 100, 128, 1000, 4000))
        for adapters, rows in counts:
            total = adapters * rows
            if total > max_rows or adapters > max_loras:
                continue
            own = [(slot, rows) for slot in range(adapters)]
            for others in {max(0, MOST_MIXED_ROWS + 1 - total), max_rows - total}:
                punica.update_metadata(LoRAMapping((*own, (-1, others)), ()))
                missing = forms(meta.plan) - warm
                assert not missing, (ranks[:2], adapters, rows, others, meta.plan, missing)


@pytest.mark.parametrize("max_sequences", [16, 64, 256])
@of_head
def test_every_form_of_the_heads_adapters_has_run(
    forms: Callable[[LaunchPlan], Forms], max_sequences: int
) -> None:
    """Of steps with a row a sequence there, captured ones, too: they end before the head."""
    punica = PunicaWrapperCPU(LIMITS.max_loras, LIMITS.max_rows)
    meta = punica.prompt_mapping_meta
    warm = run_before(replace(LIMITS, max_sequences=max_sequences), punica, meta, forms)
    for ranks in RANKS:
        for slot, rank in enumerate(ranks):
            punica.set_slot_rank(slot, rank)
        for adapters, rows in itertools.product((1, 2, 8, 9, 20, 40, 64), (1, 2, 4, 7, 8, 17, 32, 64)):
            if (total := adapters * rows) <= max_sequences:
                own = [(slot, rows) for slot in range(adapters)]
                punica.update_metadata(LoRAMapping((), (*own, (-1, max_sequences - total))))
                missing = forms(meta.plan) - warm
                assert not missing, (ranks[:2], adapters, rows, meta.plan, missing)


def test_the_steps_are_possible_ones() -> None:
    spare = KVCache((LayerCache(torch.zeros(2, 1, 16, 1, 2), None),), 0, 16)
    for step in warm_up_steps(LIMITS, spare, experts=True):
        for sequence in step.sequences:
            check(sequence, spare)
