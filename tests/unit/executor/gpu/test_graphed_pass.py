"""Captured and eager steps against the plain forward pass, on the CPU (engines/gpu_steps.py)."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from adapter_store.module_names import DENSE_PROJECTIONS
from executor.gpu import graphed_pass as graphed_forward
from executor.gpu.attention.none import NoAttention
from executor.gpu.graph_plans import GraphSizes, LoRAPlans
from executor.gpu.graphed_pass import GraphedForwardPass
from executor.gpu.warm_up import StepLimits
from executor.layers.attention import KVCache, LayerCache
from executor.lora.arena import SlotArena
from executor.lora.config import LoRAConfig
from executor.lora.image import build_slot_image
from executor.lora.replace import attach_lora
from executor.lora.slot_marks import SlotMarks
from executor.models import CausalLM, load_model
from executor.step.forward_pass import EagerForwardPass
from executor.step.inputs import SequenceRows
from kernels.punica import PunicaWrapperBase, PunicaWrapperCPU
from tests.support.adapters.tiny_models import save_variant
from tests.support.engines.gpu_steps import BufferAttention, BufferStep, RerunMemory, SkippingFollowers
from tests.unit.executor.lora.adapters import make_adapter, poison

BLOCK, BLOCKS, MAX_LORAS, MAX_ROWS, MAX_LEN = 4, 60, 12, 96, 40
LIMITS = StepLimits(MAX_ROWS, 24, MAX_LEN, MAX_LORAS, 16)


def cache_of(model: CausalLM) -> KVCache:
    """With the spare block, all NaN but for that block."""
    shape = (2, BLOCKS + 1, BLOCK, model.config.num_kv_heads, model.config.head_dim)
    layers = []
    for window in model.config.windows:
        data = torch.full(shape, float("nan"))
        data[:, BLOCKS] = 0.0
        layers.append(LayerCache(data, window))
    return KVCache(tuple(layers), BLOCKS, BLOCK)


Attach = Callable[[CausalLM, PunicaWrapperBase], tuple[SlotMarks, ...]]


class Pair:
    """The plain forward pass and the captured one, over models and slots of the same values. `attach` puts
    more onto each of the two models than low-rank pairs."""

    def __init__(
        self, folder: str, modules: frozenset[str], attach: Attach = lambda model, punica: ()
    ) -> None:
        plain_punica, punica = (PunicaWrapperCPU(MAX_LORAS, MAX_ROWS) for _ in range(2))
        plain, plain_arena = _served(folder, modules, plain_punica)
        model, arena = _served(folder, modules, punica)
        self.arenas: tuple[SlotArena, SlotArena] = (plain_arena, arena)
        attach(plain, plain_punica)
        marks = attach(model, punica)
        self.plain = EagerForwardPass(plain, cache_of(plain), plain_punica)
        self.graphed = GraphedForwardPass(
            model, cache_of(model), punica, BufferAttention(), SkippingFollowers(), LIMITS,
            GraphSizes((1, 2, 8, 24), (16, 48)), LoRAPlans(MAX_LORAS, 16), RerunMemory(),
            head_has_lora="lm_head" in modules or bool(marks), marks=marks,
        )  # fmt: skip

    def load(self, slot: int, rank: int, seed: int) -> None:
        for arena in self.arenas:
            poison(arena, slot)
            ranks = dict.fromkeys((part.module for part in arena.layout.slices), rank)
            adapter = make_adapter(arena.layout, ranks, seed, scale=2.0)
            arena.load(slot, build_slot_image(adapter, arena.layout))

    def check(self, sequences: Sequence[SequenceRows], last_tokens: Tensor | None = None) -> None:
        expected = self.plain.run(sequences, last_tokens)
        actual = self.graphed.run(sequences, last_tokens)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def _served(folder: str, modules: frozenset[str], punica: PunicaWrapperBase) -> tuple[CausalLM, SlotArena]:
    model = load_model(folder, torch.float32, "cpu")
    return model, attach_lora(model, LoRAConfig(MAX_LORAS, 16, modules), punica).arena


@pytest.fixture(scope="module", params=["llama-biases", "qwen3", "qwen2-window"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    modules = frozenset(DENSE_PROJECTIONS)
    if request.param == "llama-biases":
        modules |= {"embed_tokens", "lm_head"}
    if request.param == "qwen2-window":
        modules = frozenset({"q_proj", "v_proj", "up_proj", "o_proj"})
    folder = save_variant(request.param, tmp_path_factory.mktemp(request.param))
    monkeypatch = pytest.MonkeyPatch()
    request.addfinalizer(monkeypatch.undo)
    monkeypatch.setattr(graphed_forward, "DecodeStep", BufferStep)
    pair = Pair(folder, modules)
    for slot in range(MAX_LORAS):
        pair.load(slot, 1 + slot % 16, seed=slot)
    pair.graphed.warm_up()
    for slot in range(MAX_LORAS):  # other adapters than at capture
        pair.load(slot, 16 - slot, seed=100 + slot)
    return pair


def test_decoding_with_adapters_that_come_and_go(pair: Pair) -> None:
    """Prompts in chunks beside decoding, then pure decoding with pending tokens, with other adapters, counts
    and numbers of sequences in every step."""
    rng = random.Random(0)
    free = list(range(BLOCKS))
    rng.shuffle(free)
    tables = [[free.pop() for _ in range(3)] for _ in range(20)]
    lengths = [0] * len(tables)
    slots = [rng.randrange(-1, MAX_LORAS) for _ in tables]

    def rows(number: int, count: int, **changes: object) -> SequenceRows:
        start = lengths[number]
        lengths[number] += count
        tokens = [rng.randrange(128) for _ in range(count)]
        made = SequenceRows(tokens, start, tables[number], slots[number], (count - 1,))
        return replace(made, **changes)

    pair.check([rows(0, 5), rows(1, 1, logit_rows=())])
    pair.check([rows(0, 1), rows(1, 4), rows(2, 3, logit_rows=(0, 2)), rows(3, 2, logit_rows=())])
    pair.check([rows(n, 3) for n in range(3, 20)])  # 51 rows: not captured
    for active in (1, 2, 3, 8, 13, 20):
        pair.check([rows(n, 1) for n in rng.sample(range(20), active)])
    slots[:] = [5] * 20
    pair.check([rows(n, 1) for n in range(20)])
    slots[:] = [-1] * 20
    pair.check([rows(n, 1) for n in range(20)])
    slots[3] = 11
    last_tokens = torch.tensor([99, 7, 55])
    pair.check([rows(3, 1, token_ids=[0], pending=2), rows(4, 1)], last_tokens)


def test_a_step_of_many_rows_of_one_adapter(pair: Pair) -> None:
    pair.check([SequenceRows(list(range(32)), 0, list(range(8)), 2, (31,))])
    pair.check([SequenceRows(list(range(30)), 0, list(range(8)), 7, range(30))])


def test_without_attention_steps_run_all_else(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured and not. Nothing of what is in the cache is in their logits."""
    monkeypatch.setattr(pair.graphed, "_attention", NoAttention())
    tokens = [5 + number for number in range(60)]
    for rows in (40, 60):
        alone, behind = (
            pair.graphed.run([SequenceRows(tokens[:rows], start, list(range(30)), 2, (rows - 1,))])
            for start in (0, 30)
        )
        assert alone.shape == (1, 128) and alone.isfinite().all()
        if rows == 60:  # not captured: a captured one keeps what was where attention writes
            torch.testing.assert_close(alone, behind)


def test_an_empty_step_has_no_logits(pair: Pair) -> None:
    assert pair.graphed.run([]).shape == (0, 128)


def test_impossible_rows_are_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match="do not cover"):
        pair.graphed.run([SequenceRows([1] * 5, 0, [0], -1, ())])
    with pytest.raises(ValueError, match="no last_tokens"):
        pair.graphed.run([SequenceRows([0], 0, [0], -1, (), pending=0)])


def test_steps_of_every_size_are_captured(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of more rows than the plan for few adapters has room for."""
    monkeypatch.setattr(graphed_forward, "DecodeStep", BufferStep)
    rows, loras = 256, 64
    punica = PunicaWrapperCPU(loras, rows)
    model = load_model(save_variant("llama", tmp_path_factory.mktemp("llama")), torch.float32, "cpu")
    attach_lora(model, LoRAConfig(loras, 4), punica)
    graphed = GraphedForwardPass(
        model, cache_of(model), punica, BufferAttention(), SkippingFollowers(),
        StepLimits(rows, rows, MAX_LEN, loras, 4), GraphSizes.up_to(rows, rows), LoRAPlans(loras, 4),
        RerunMemory(), head_has_lora=False,
    )  # fmt: skip
    graphed.warm_up()
