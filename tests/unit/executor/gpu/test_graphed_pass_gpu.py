"""The whole forward pass on a GPU, captured and eager, against plain torch around the same LoRA."""

import gc
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adapter_store.module_names import DENSE_PROJECTIONS
from executor.build_shard import build_shard
from executor.config import ExecutorConfig
from executor.distributed import SINGLE
from executor.errors import StartError
from executor.gpu.layer_kinds import layer_kinds
from executor.layers.attention import KVCache
from executor.lora.config import LoRAConfig
from executor.lora.image import build_slot_image
from executor.lora.replace import attach_lora
from executor.models import load_model
from executor.step.forward_pass import EagerForwardPass, ForwardPass
from executor.step.inputs import SequenceRows
from executor.step.shard import Shard
from kernels.punica import PunicaWrapperCPU
from tests.support.engines.compilations import compilations
from tests.support.engines.random_steps import random_ranks, random_runs
from tests.unit.executor.lora.adapters import make_adapter, poison

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
}
BLOCK, BLOCKS, SEQUENCES, SLOTS = 16, 200, 40, 12
# The kernels that follow a projection also run without an adapter, which they are then compiled for.
LORA_KERNELS = {"shrink_kernel", "expand_kernel", "embedding_kernel", "scale_outputs_kernel"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dummy")
    (path / "config.json").write_text(json.dumps(MODEL))
    return path


def make_shard(folder: Path, **settings: object) -> Shard:
    given = {
        "model": str(folder), "store": "unused", "device": "cuda", "load_format": "dummy", "max_loras": SLOTS,
        "max_lora_rank": 16, "max_seats": SEQUENCES, "max_batched_tokens": 700, "num_kv_blocks": BLOCKS,
        "block_size": BLOCK, "compile_processes": 1,
    } | settings  # fmt: skip
    return build_shard(ExecutorConfig(**given), SINGLE)  # type: ignore[arg-type]


class Plain:
    """Torch alone, on the CPU."""

    def __init__(
        self, folder: Path, shard: Shard, modules: frozenset[str], max_rank: int, dtype: torch.dtype
    ) -> None:
        self.model = model = load_model(folder, dtype, "cpu", dummy=True)
        values = {name.replace("base_layer.", ""): p for name, p in shard.model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
        self.punica = PunicaWrapperCPU(SLOTS, 700)
        self.arena = attach_lora(model, LoRAConfig(SLOTS, max_rank, modules, dtype), self.punica).arena
        cache = KVCache.allocate(BLOCKS, BLOCK, model.config, dtype, "cpu")
        self.forward_pass = EagerForwardPass(model, cache, self.punica)


class Served:
    """A shard on the GPU; the same weights and adapters on the CPU, in float32 and in its own dtype."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.shard = make_shard(folder, **settings)
        modules = frozenset(settings.get("lora_modules", DENSE_PROJECTIONS))  # type: ignore[call-overload]
        self.dtype = self.shard.arena.storage.dtype
        self.max_rank = int(settings.get("max_lora_rank", 16))  # type: ignore[call-overload]
        self.exact = Plain(folder, self.shard, modules, self.max_rank, torch.float32)
        self.rounded = Plain(folder, self.shard, modules, self.max_rank, self.dtype)
        self.errors: list[tuple[float, float]] = []  # (ours, torch's) of each step

    def load(self, slot: int, rank: int, seed: int) -> None:
        """`rank` of 16; of as many times more as a slot holds."""
        rank = rank * self.max_rank // 16
        for arena in (self.exact.arena, self.rounded.arena, self.shard.arena):
            poison(arena, slot)
            ranks = dict.fromkeys((part.module for part in arena.layout.slices), rank)
            adapter = make_adapter(arena.layout, ranks, seed, scale=1.0)
            arena.load(slot, build_slot_image(adapter, arena.layout))
        self.shard.punica.set_slot_rank(slot, rank)
        torch.cuda.synchronize()

    def check(self, sequences: Sequence[SequenceRows], last_tokens: Tensor | None = None) -> None:
        expected = self.exact.forward_pass.run(sequences, last_tokens)
        rounded = self.rounded.forward_pass.run(sequences, last_tokens)
        on_gpu = None if last_tokens is None else last_tokens.cuda()
        actual = self.shard.forward_pass.run(sequences, on_gpu).cpu()
        error, usual = (float((each - expected).norm() / expected.norm()) for each in (actual, rounded))
        self.errors.append((error, usual))
        if self.dtype == torch.float32:
            assert error < 1e-4
            best = expected.topk(2).values
            clear = best[:, 0] - best[:, 1] > 1e-3
            assert torch.equal(actual.argmax(-1)[clear], expected.argmax(-1)[clear])
        else:
            assert error < 0.1, usual

    def check_all(self) -> None:
        """Over all steps since the last call it is as near to float32 as torch is in the same dtype."""
        errors, self.errors = self.errors, []
        if self.dtype != torch.float32:
            ours, theirs = map(sum, zip(*errors, strict=True))
            assert ours < 1.2 * theirs, errors


HEAD = {"lora_modules": ("q_proj", "k_proj", "v_proj", "up_proj", "down_proj", "embed_tokens", "lm_head")}
SERVED: dict[str, dict[str, object]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "bfloat16 head": {"dtype": "bfloat16", **HEAD},
    "bfloat16 rank 64": {"dtype": "bfloat16", "max_lora_rank": 64},
}


@pytest.fixture(scope="module", params=SERVED)
def served(request: pytest.FixtureRequest, folder: Path) -> Served:
    served = Served(folder, **SERVED[request.param])
    for slot in range(SLOTS):
        served.load(slot, 1 + slot % 16, seed=slot)
    return served


class Traffic:
    """Sequences of random tokens over shuffled blocks."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        free = list(range(BLOCKS))
        self.rng.shuffle(free)
        self.tables = [[free.pop() for _ in range(5)] for _ in range(SEQUENCES)]
        self.lengths = [0] * SEQUENCES
        self.slots = [self.rng.randrange(-1, SLOTS) for _ in range(SEQUENCES)]

    def rows(self, number: int, count: int, **changes: object) -> SequenceRows:
        start = self.lengths[number]
        self.lengths[number] += count
        tokens = [self.rng.randrange(512) for _ in range(count)]
        made = SequenceRows(tokens, start, self.tables[number], self.slots[number], (count - 1,))
        return replace(made, **changes)

    def some(self, count: int) -> list[int]:
        return self.rng.sample(range(SEQUENCES), count)


def test_every_kind_of_step_with_adapters_that_come_and_go(served: Served) -> None:
    """More rows than are captured, chunks beside decoding, then decoding in every family of captured steps;
    slots are rewritten between steps, with other ranks than at capture."""
    traffic = Traffic(0)
    rows, slots = traffic.rows, traffic.slots
    served.check([rows(n, 17) for n in range(40)])
    served.check([rows(n, 1) for n in range(30)] + [rows(n, 9, logit_rows=()) for n in range(30, 40)])
    served.check([rows(0, 3, logit_rows=(0, 2)), rows(1, 1, logit_rows=())])
    for active in (1, 2, 3, 8, 9, 24, 33, 40):
        served.check([rows(n, 1) for n in traffic.some(active)])
    for number, pattern in enumerate(([5], [-1], [0, 1, 2], range(SLOTS), [7, -1])):
        slots[:] = [pattern[n % len(pattern)] for n in range(SEQUENCES)]
        served.load(number, 16 - number, seed=100 + number)
        served.check([rows(n, 1) for n in range(40)])
        served.check([rows(n, 1) for n in range(20)] + [rows(39, 4)])
    last_tokens = torch.randint(0, 512, (64,))
    served.check([rows(n, 1, token_ids=[0], pending=63 - n) for n in range(40)], last_tokens)
    served.check_all()


def test_a_request_finishes_one_by_one_from_eight_adapters(served: Served) -> None:
    """After each step one sequence fewer, and then the others with its slot rewritten."""
    traffic = Traffic(1)
    traffic.slots[:8] = range(8)
    served.check([traffic.rows(n, 30) for n in range(8)])
    for left in range(8, 0, -1):
        served.check([traffic.rows(n, 1) for n in range(left)])
        served.load(left - 1, 1 + left, seed=200 + left)
    served.check_all()


def test_equal_steps_give_equal_bits(served: Served) -> None:
    forward_pass, steps = served.shard.forward_pass, []
    for _ in range(2):
        traffic = Traffic(2)
        forward_pass.run([traffic.rows(n, 17) for n in range(40)])
        steps.append([forward_pass.run([traffic.rows(n, 1) for n in range(40)]) for _ in range(3)])
    assert all(torch.equal(one, other) for one, other in zip(*steps, strict=True))


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_hundreds_of_slots_give_the_same_bits(tmp_path: Path, kind: str) -> None:
    """Adapters far apart among 300 slots, and side by side among 64: a step layer by layer, a captured one of
    prompts beside decoding, and decoding are launched alike."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL | (EXPERTS if kind == "experts" else {})))
    modules = ("q_proj", "k_proj", "v_proj", "o_proj", "experts") if kind == "experts" else DENSE_PROJECTIONS
    results = []
    for max_loras, apart in ((64, 1), (300, 25)):
        shard = make_shard(tmp_path, max_loras=max_loras, lora_modules=tuple(modules), dtype="bfloat16")
        layout = shard.arena.layout
        for number in range(SLOTS):
            ranks = dict.fromkeys((part.module for part in layout.slices), 1 + number)
            adapter = make_adapter(layout, ranks, seed=number, scale=1.0)
            shard.arena.load(number * apart, build_slot_image(adapter, layout))
            shard.punica.set_slot_rank(number * apart, 1 + number)
        traffic = Traffic(3)
        traffic.slots = [slot if slot < 0 else slot * apart for slot in traffic.slots]
        rows = traffic.rows
        steps = [
            [rows(n, 17) for n in range(40)],
            [rows(n, 1) for n in range(30)] + [rows(n, 16) for n in range(30, 40)],
            [rows(n, 1) for n in range(40)],
        ]
        results.append([shard.forward_pass.run(step) for step in steps])
    assert all(torch.equal(few, many) for few, many in zip(*results, strict=True))


def test_blocks_of_a_cache_whose_offsets_exceed_32_bits(folder: Path) -> None:
    """Prompts, chunks beside decoding, and decoding, captured or not: in the last blocks as in the first."""
    elements = BLOCK * MODEL["num_key_value_heads"] * MODEL["head_dim"]  # type: ignore[operator]
    last = 2**31 // elements
    shard = make_shard(folder, num_kv_blocks=last + 100, dtype="bfloat16")
    runs = []
    for first in (0, last):
        tables = [list(range(first + 45 * number, first + 45 * number + 45)) for number in range(2)]
        steps = (
            [SequenceRows([7] * 600, 0, tables[0], -1, (599,))],
            [SequenceRows([9], 600, tables[0], -1, (0,)), SequenceRows([5] * 60, 0, tables[1], -1, (59,))],
            [
                SequenceRows([3], length, table, -1, (0,))
                for length, table in zip((601, 60), tables, strict=True)
            ],
        )
        runs.append([shard.forward_pass.run(step).clone() for step in steps])
    for low, high in zip(*runs, strict=True):
        assert torch.equal(low, high)
        assert low.isfinite().all()


def kernels_of(forward_pass: ForwardPass, step: Sequence[SequenceRows]) -> set[str]:
    """The names of those that ran on the device, from a graph or not."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        forward_pass.run(step)
        torch.cuda.synchronize()
    return {event.key for event in profile.key_averages()}


def test_a_step_without_adapters_runs_no_lora_kernel(served: Served) -> None:
    """Decoding and chunks, captured, and a step that is not, whatever is resident. With an adapter all do."""
    forward_pass, seen = served.shard.forward_pass, []
    for slot in (-1, 3):
        traffic = Traffic(7)
        traffic.slots[0] = slot
        traffic.slots[1:] = [-1] * (SEQUENCES - 1)
        rows = traffic.rows
        steps = ([rows(n, 17) for n in range(40)], [rows(0, 33), rows(1, 1)], [rows(n, 1) for n in range(40)])
        seen += [kernels_of(forward_pass, step) for step in (*steps, [rows(0, 1)])]
    assert all(kernels and not kernels & LORA_KERNELS for kernels in seen[:4]), seen[:4]
    assert all("shrink_kernel" in kernels for kernels in seen[4:]), seen[4:]


def test_nothing_compiles_after_it_is_ready(served: Served) -> None:
    """Other numbers of rows and adapters, every rank that a slot can hold, and whatever else comes."""
    with compilations() as compiled:
        for rank in (8, 16, 3):
            for slot in range(SLOTS):
                served.load(slot, rank, seed=slot)
            traffic = Traffic(rank)
            run: Callable[..., Tensor] = served.shard.forward_pass.run
            run([traffic.rows(n, 17) for n in range(40)])
            for active in (1, 5, 21, 40):
                run([traffic.rows(n, 1) for n in traffic.some(active)])
            run([traffic.rows(0, 33), traffic.rows(1, 1)])
            traffic = Traffic(rank)
            traffic.slots[:] = [2] + [-1] * (SEQUENCES - 1)
            run([traffic.rows(n, 17) for n in range(40)])
        run_whatever_comes(served.shard, served.max_rank)
    assert not compiled


@pytest.mark.parametrize("max_rank", [16, 64])
def test_nothing_compiles_after_a_model_with_experts_is_ready(tmp_path: Path, max_rank: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL | EXPERTS))
    modules = ("q_proj", "k_proj", "v_proj", "o_proj", "experts")
    shard = make_shard(tmp_path, lora_modules=modules, max_lora_rank=max_rank, dtype="bfloat16")
    with compilations() as compiled:
        run_whatever_comes(shard, max_rank)
    assert not compiled


def run_whatever_comes(shard: Shard, max_rank: int) -> None:
    rng = random.Random(0)
    for runs in islice(random_runs(rng, SLOTS, 700, 1), 80):
        random_ranks(rng, shard.punica, max_rank)
        shard.forward_pass.run(traffic_of(runs))


def traffic_of(runs: Sequence[tuple[int, int]]) -> list[SequenceRows]:
    """As sequences of up to 80 new tokens."""
    traffic, step = Traffic(0), []
    for slot, count in runs:
        for start in range(0, count, 80):
            traffic.slots[len(step)] = slot
            step.append(traffic.rows(len(step), min(80, count - start)))
    return step


def test_nothing_compiles_for_layers_whose_tables_of_ranks_begin_elsewhere(folder: Path) -> None:
    """Of seven modules a layer, with two slots: in the middle of 16 bytes in the second layer alone."""
    shard = make_shard(folder, max_loras=2)
    assert layer_kinds(shard.model) == (0, 1)
    with compilations() as compiled:
        for slots in ((0, 1, -1), (1,), (-1,)):
            for rows in (1, 30, 600 // len(slots)):
                blocks = [range(40 * number, 40 * number + 40) for number in range(len(slots))]
                shard.forward_pass.run([
                    SequenceRows([3] * rows, 0, list(table), slot, (rows - 1,))
                    for slot, table in zip(slots, blocks, strict=True)
                ])  # fmt: skip
    assert not compiled


def test_kv_blocks_come_from_the_memory_that_is_left(folder: Path) -> None:
    settings = {"num_kv_blocks": 0, "cuda_graphs": False, "max_batched_tokens": 64}
    total = torch.cuda.get_device_properties(0).total_memory
    sizes = []
    for share in (0.2, 0.3):
        sizes.append(make_shard(folder, gpu_memory_utilization=share, **settings).kv_cache.nbytes)
        gc.collect()  # or the first one takes what the second one is to have
    assert sizes[1] - sizes[0] == pytest.approx(0.1 * total, rel=0.2)
    with pytest.raises(StartError, match="leaves 0 KV blocks"):
        make_shard(folder, gpu_memory_utilization=0.01, **settings)


def test_a_gpu_that_is_not_there(folder: Path) -> None:
    with pytest.raises(StartError, match="cuda:63"):
        make_shard(folder, device="cuda:63")
