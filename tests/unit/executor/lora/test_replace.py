"""attach_lora on a whole small decoder; the truth is a copy with the adapter merged into its weights."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from adapter_store import LoRAModule
from adapter_store.module_names import DENSE_PROJECTIONS
from executor.layers import LinearBase
from executor.layers.attention import KVCache
from executor.lora.arena import SlotArena
from executor.lora.config import LoRAConfig
from executor.lora.errors import LayerRefused, ModuleNotInModel
from executor.lora.image import build_slot_image
from executor.lora.layers import BaseLayerWithLoRA
from executor.lora.replace import attach_lora
from executor.models import CausalLM
from executor.step.inputs import SequenceRows, build_step
from kernels.punica import PunicaWrapperCPU
from tests.unit.executor.lora.adapters import make_adapter, poison
from tests.unit.executor.lora.layer_cases import MODEL_CONFIG

EVERYTHING = frozenset(DENSE_PROJECTIONS) | {"embed_tokens", "lm_head"}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [7], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4], [5, 3]]


@dataclass(frozen=True)
class Served:
    plain: CausalLM
    model: CausalLM
    punica: PunicaWrapperCPU
    arena: SlotArena

    def load(self, slot: int, ranks: Mapping[str, int], seed: int) -> dict[str, LoRAModule]:
        adapter = make_adapter(self.arena.layout, ranks, seed, scale=2.0)
        self.arena.load(slot, build_slot_image(adapter, self.arena.layout))
        return adapter

    def logits(self, slots: Sequence[int]) -> list[Tensor]:
        """One sequence a slot, all in one step; float32 [tokens, vocab] each."""
        return run(self.model, slots, self.punica)


def make_model(tied: bool) -> CausalLM:
    torch.manual_seed(0)
    model = CausalLM(replace(MODEL_CONFIG, tied_head=tied))
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    return model


def serve(modules: frozenset[str] = EVERYTHING, *, tied: bool = False, max_loras: int = 4) -> Served:
    model = make_model(tied)
    punica = PunicaWrapperCPU(max_loras, 64)
    plain = copy.deepcopy(model)
    arena = attach_lora(model, LoRAConfig(max_loras, 8, modules), punica).arena
    for slot in range(max_loras):
        poison(arena, slot)
    return Served(plain, model, punica, arena)


def run(model: CausalLM, slots: Sequence[int], punica: PunicaWrapperCPU | None = None) -> list[Tensor]:
    cache = KVCache.allocate(8, 16, model.config, torch.float32, "cpu")
    prompts = PROMPTS[: len(slots)]
    sequences = [
        SequenceRows(prompt, 0, [block], slot, range(len(prompt)))
        for block, (prompt, slot) in enumerate(zip(prompts, slots, strict=True))
    ]
    tokens, ctx = build_step(sequences, cache, punica)
    logits = model.compute_logits(model(tokens, ctx), ctx)
    return list(torch.split(logits, [len(prompt) for prompt in prompts]))


def merged(plain: CausalLM, adapter: Mapping[str, LoRAModule]) -> CausalLM:
    """A copy, head untied, with scale * B @ A added to each module's own rows of its packed weight."""
    model = copy.deepcopy(plain)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    for name, module in adapter.items():
        delta = module.scale * torch.tensor(module.lora_b).T @ torch.tensor(module.lora_a)
        if name == "embed_tokens":
            model.model.embed_tokens.weight += delta.T
        elif name == "lm_head":
            model.lm_head.weight += delta
        else:
            add_to_layer(model, name, delta)
    return model


def add_to_layer(model: CausalLM, name: str, delta: Tensor) -> None:
    prefix, _, kind = name.rpartition(".")
    packed = {m: (p, i) for p, members in model.packed_modules_mapping.items() for i, m in enumerate(members)}
    leaf, part = packed.get(kind, (kind, 0))
    block = model.model.get_submodule(prefix)
    layer = next(child for path, child in block.named_modules() if path.endswith(leaf))
    assert isinstance(layer, LinearBase)
    start = sum(layer.output_sizes[:part])
    layer.weight[start : start + layer.output_sizes[part]] += delta


def check(served: Served, slots: Sequence[int], adapters: Mapping[int, Mapping[str, LoRAModule]]) -> None:
    base = run(served.plain, slots)
    for number, (slot, logits) in enumerate(zip(slots, served.logits(slots), strict=True)):
        expected = run(merged(served.plain, adapters.get(slot, {})), slots)[number]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        if slot == -1:
            assert torch.equal(logits, base[number])
        elif adapters[slot]:
            assert not torch.allclose(logits, base[number], rtol=1e-2, atol=1e-2), "the adapter is not loud"


def all_modules(served: Served, rank: int) -> dict[str, int]:
    return {part.module: rank for part in served.arena.layout.slices}


PARTIAL = {
    "q": {"layers.0.q_proj": 4, "layers.1.q_proj": 4},
    "q+v": {"layers.0.q_proj": 4, "layers.0.v_proj": 3, "layers.1.v_proj": 8},
    "k": {"layers.0.k_proj": 4, "layers.1.k_proj": 4},
    "gate": {"layers.0.gate_proj": 4, "layers.1.gate_proj": 4},
    "up": {"layers.1.up_proj": 4},
    "q+gate": {"layers.0.q_proj": 4, "layers.1.gate_proj": 4},
    "v in layer 0, q in layer 1": {"layers.0.v_proj": 4, "layers.1.q_proj": 4},
}


@pytest.mark.parametrize("ranks", PARTIAL.values(), ids=PARTIAL.keys())
def test_an_adapter_over_part_of_a_packed_projection(ranks: dict[str, int]) -> None:
    served = serve()
    adapters = {0: served.load(0, all_modules(served, 8), seed=1), 1: served.load(1, ranks, seed=2)}
    check(served, [1, 0, 1, -1], adapters)


@pytest.mark.parametrize("slots", [[0, 0, 1, 0], [0, 1, 0, 1], [0, 1, 1, 0], [0, -1, 1, -1], [-1, 0, -1, 0]])
def test_adapters_and_base_in_any_order(slots: list[int]) -> None:
    served = serve()
    adapters = {
        0: served.load(0, all_modules(served, 5), seed=1),
        1: served.load(1, {"layers.0.q_proj": 2, "layers.1.down_proj": 7, "lm_head": 3}, seed=2),
    }
    check(served, slots, adapters)
    check(served, [-1, -1, -1, -1], adapters)


def test_a_reused_slot_answers_like_a_cold_one() -> None:
    served, cold = serve(max_loras=1), serve(max_loras=1)
    small = {"layers.0.q_proj": 4}
    cold.load(0, small, seed=2)
    expected = cold.logits([0, 0])
    for _ in range(2):
        served.load(0, all_modules(served, 8), seed=1)
        served.load(0, small, seed=2)
        assert all(map(torch.equal, served.logits([0, 0]), expected))
    served.load(0, all_modules(served, 8), seed=1)
    served.arena.clear(0)
    assert all(map(torch.equal, served.logits([0, 0]), run(served.plain, [-1, -1])))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["embed_tokens", "lm_head"])
def test_head_and_embedding_stay_apart_also_when_tied(kind: str, tied: bool) -> None:
    served = serve(tied=tied)
    adapters = {2: served.load(2, {kind: 6}, seed=1)}
    check(served, [2, -1, 2], adapters)


def test_only_the_named_kinds_are_replaced() -> None:
    served = serve(frozenset({"v_proj", "down_proj"}))
    replaced = {
        p: type(m).__name__ for p, m in served.model.named_modules() if isinstance(m, BaseLayerWithLoRA)
    }
    assert replaced == {
        f"model.layers.{layer}.{path}": name
        for layer in range(2)
        for path, name in (
            ("self_attn.qkv_proj", "MergedQKVParallelLinearWithLoRA"),
            ("mlp.down_proj", "RowParallelLinearWithLoRA"),
        )
    }
    assert [part.module for part in served.arena.layout.slices] == [
        f"layers.{layer}.{kind}" for layer in range(2) for kind in ("v_proj", "down_proj")
    ]
    check(served, [1, -1], {1: served.load(1, all_modules(served, 3), seed=1)})


def test_a_kind_without_layer_is_refused_and_the_model_stays_plain() -> None:
    model = make_model(tied=False)
    config = LoRAConfig(2, 8, frozenset({"q_proj", "w1", "router"}))
    with pytest.raises(ModuleNotInModel, match="router, w1"):
        attach_lora(model, config, PunicaWrapperCPU(2, 64))
    with pytest.raises(ValueError, match="3 slots"):
        attach_lora(model, LoRAConfig(2, 8), PunicaWrapperCPU(3, 64))
    assert not any(isinstance(module, BaseLayerWithLoRA) for module in model.modules())


def test_what_was_replaced_is_reported() -> None:
    model = make_model(tied=False)
    config = LoRAConfig(2, 8, frozenset({"q_proj", "up_proj", "lm_head"}))
    attached = attach_lora(model, config, PunicaWrapperCPU(2, 64))
    assert {path: type(layer).__name__ for path, layer in attached.replaced.items()} == {
        "model.layers.0.self_attn.qkv_proj": "MergedQKVParallelLinearWithLoRA",
        "model.layers.0.mlp.gate_up_proj": "MergedColumnParallelLinearWithLoRA",
        "model.layers.1.self_attn.qkv_proj": "MergedQKVParallelLinearWithLoRA",
        "model.layers.1.mlp.gate_up_proj": "MergedColumnParallelLinearWithLoRA",
        "logits_processor": "LogitsProcessorWithLoRA",
    }
    assert all(model.get_submodule(path) is layer for path, layer in attached.replaced.items())
    assert str(attached) == (
        "1 LogitsProcessorWithLoRA, 2 MergedColumnParallelLinearWithLoRA, 2 MergedQKVParallelLinearWithLoRA; "
        f"2 slots of {attached.arena.nbytes_per_slot} bytes"
    )


def test_a_layer_that_no_class_fits_is_refused_and_the_model_stays_plain() -> None:
    model = make_model(tied=False)
    config = LoRAConfig(2, 8, frozenset({"q_proj", "input_layernorm"}))
    with pytest.raises(LayerRefused, match=r"RMSNorm with modules layers\.0\.input_layernorm"):
        attach_lora(model, config, PunicaWrapperCPU(2, 64))
    assert not any(isinstance(module, BaseLayerWithLoRA) for module in model.modules())
