"""The Triton followers, interpreted, against torch's; and every way in which a layer with LoRA uses them."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from executor.layers import RMSNorm, RotaryEmbedding
from executor.layers.followers import TORCH_FOLLOWERS, Follower, Heads
from executor.layers.norm import make_norm
from executor.layers.triton_followers import TritonFollowers
from executor.lora import fused_delta
from executor.lora.arena import SlotArena
from executor.lora.config import LoRAConfig
from executor.lora.dora import DoRAFactors
from executor.lora.image import build_slot_image
from executor.lora.layers import BaseLinearLayerWithLoRA
from executor.lora.replace import attach_lora
from executor.models import CausalLM
from kernels.metadata.meta import LoRAMapping
from kernels.punica_gpu import PunicaWrapperGPU
from tests.unit.executor.lora.adapters import make_adapter, poison
from tests.unit.executor.lora.layer_cases import MODEL_CONFIG as NARROW

T = TypeVar("T")
ROWS, HEAD_DIM = 5, 16
MODEL_CONFIG = replace(NARROW, head_dim=HEAD_DIM)
TRITON = TritonFollowers()
HEADS = Heads((4 * HEAD_DIM, 2 * HEAD_DIM, 2 * HEAD_DIM), HEAD_DIM)


def norm(width: int) -> RMSNorm:
    layer = RMSNorm(width, 1e-5)
    torch.nn.init.uniform_(layer.weight, 0.5, 1.5)
    return layer


def test_silu_mul() -> None:
    y = torch.randn(ROWS, 64)
    torch.testing.assert_close(TRITON.gated("silu").plain(y), TORCH_FOLLOWERS.gated("silu").plain(y))


def test_add_norm_changes_the_residual() -> None:
    y, residual, layer = torch.randn(ROWS, 48), torch.randn(ROWS, 48), norm(48)
    other = residual.clone()
    expected = TORCH_FOLLOWERS.add_norm(residual, layer).plain(y)
    torch.testing.assert_close(TRITON.add_norm(other, layer).plain(y), expected)
    torch.testing.assert_close(other, residual)


def test_norms_of_outputs_are_added_in_plain_torch() -> None:
    y, residual, layer, own = torch.randn(ROWS, 48), torch.randn(ROWS, 48), norm(48), norm(48)
    for then, expected in ((layer, layer(residual + own(y))), (None, residual + own(y))):
        follower = TRITON.add_norm(added := residual.clone(), then, own)
        torch.testing.assert_close(follower.plain(y.clone()), expected)
        torch.testing.assert_close(added, residual + own(y))
        assert follower.fused is None


def test_gelu_and_norms_with_one_added_are_plain_torch() -> None:
    y, residual, layer = torch.randn(ROWS, 64), torch.randn(ROWS, 64), make_norm("offset_rms", 64, 1e-5)
    torch.nn.init.uniform_(layer.weight, -0.5, 0.5)
    gated, normed = TRITON.gated("gelu_tanh"), TRITON.add_norm(residual.clone(), layer)
    assert gated.fused is None and normed.fused is None
    torch.testing.assert_close(gated.plain(y), F.gelu(y[:, :32], approximate="tanh") * y[:, 32:])
    plain = RMSNorm(64, 1e-5)
    plain.weight.data = 1 + layer.weight
    torch.testing.assert_close(normed.plain(y), plain(residual + y))


def test_rows_that_are_too_wide_take_plain_torch() -> None:
    assert TRITON.add_norm(torch.zeros(1, 8193), norm(8193)).fused is None


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("head_dim", [HEAD_DIM, 24])
def test_rotate_writes_the_cache(head_dim: int, normed: bool) -> None:
    """The kernel does not serve 24 columns a head, its fused form no norms between delta and rotation."""
    heads = Heads((4 * head_dim, 2 * head_dim, 2 * head_dim), head_dim)
    if normed:
        heads = replace(heads, q_norm=norm(head_dim), k_norm=norm(head_dim))
    embedding, positions = RotaryEmbedding(head_dim, 100.0, None), torch.tensor([0, 3, 9, 1, 40])
    y, slots = torch.randn(ROWS, sum(heads.sizes)), torch.tensor([7, 0, 3, 11, 8])
    results = []
    for followers in (TORCH_FOLLOWERS, TRITON):
        cache = torch.zeros(2, 3, 4, 2, head_dim)
        rotation = followers.rotation(embedding, positions, torch.float32)
        follower = followers.rotate(heads, rotation, cache, slots)
        results.append((follower.plain(y.clone()), cache))
        assert (follower.fused is None) == (followers is TORCH_FOLLOWERS or normed or head_dim == 24)
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def test_rows_with_a_negative_slot_leave_the_cache_alone() -> None:
    cache = torch.zeros(2, 3, 4, 2, HEAD_DIM)
    rotation = TRITON.rotation(RotaryEmbedding(HEAD_DIM, 100.0, None), torch.arange(ROWS), torch.float32)
    TRITON.rotate(HEADS, rotation, cache, torch.full((ROWS,), -1)).plain(torch.randn(ROWS, sum(HEADS.sizes)))
    assert not cache.any()


@pytest.fixture
def served() -> tuple[CausalLM, SlotArena, PunicaWrapperGPU]:
    torch.manual_seed(0)
    model = CausalLM(MODEL_CONFIG)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    punica = PunicaWrapperGPU(4, 64, "cpu")
    arena = attach_lora(model, LoRAConfig(4, 8), punica).arena
    for slot in range(4):
        poison(arena, slot)
        ranks = dict.fromkeys((part.module for part in arena.layout.slices), 2 * slot + 1)
        arena.load(slot, build_slot_image(make_adapter(arena.layout, ranks, slot), arena.layout))
    return model, arena, punica


class InTurn:
    """Stands for the second stream, which only a GPU has."""

    def __init__(self) -> None:
        self.used = 0

    def run_beside(self, first: Callable[[], T], second: Callable[[], None]) -> T:
        self.used += 1
        result = first()
        second()
        return result


RUNS = pytest.mark.parametrize("runs", [((0, 2), (-1, 1), (3, 2)), ((1, 5),)])


@pytest.mark.parametrize("way", ["pair", "fused", "beside"])
@RUNS
def test_a_layer_and_its_follower_give_the_same_in_every_way(
    served: tuple[CausalLM, SlotArena, PunicaWrapperGPU],
    monkeypatch: pytest.MonkeyPatch,
    runs: tuple[tuple[int, int], ...],
    way: str,
) -> None:
    """Beside is fused here: there is no second stream."""
    model, _, punica = served
    punica.update_metadata(LoRAMapping(runs, ()))
    monkeypatch.setattr(fused_delta, "best_form", lambda plan, follower: way)
    check_followed(model)


@pytest.mark.parametrize("beside", [False, True])
def test_factors_come_on_base_and_delta_before_what_follows(
    served: tuple[CausalLM, SlotArena, PunicaWrapperGPU], monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    """A step with some takes the plain pair, where others like it take the fused form."""
    model, _, punica = served
    dora, side = DoRAFactors(model, 4), InTurn()
    for target, source in dora.enter(3, torch.rand(dora.nbytes // 4) + 0.5):
        target.copy_(source)
    punica.update_metadata(LoRAMapping(((0, 2), (-1, 1), (3, 2)), ()))
    monkeypatch.setitem(punica.__dict__, "side_stream", side)
    monkeypatch.setattr(fused_delta, "best_form", lambda plan, follower: "fused")
    monkeypatch.setattr(fused_delta, "beside_pays", lambda plan: beside)
    check_followed(model)
    assert side.used == (4 if beside else 0)


@pytest.mark.parametrize("way", ["pair", "beside"])
@RUNS
def test_shrink_beside_the_product_changes_no_result(
    served: tuple[CausalLM, SlotArena, PunicaWrapperGPU],
    monkeypatch: pytest.MonkeyPatch,
    runs: tuple[tuple[int, int], ...],
    way: str,
) -> None:
    model, _, punica = served
    punica.update_metadata(LoRAMapping(runs, ()))
    side = InTurn()
    monkeypatch.setitem(punica.__dict__, "side_stream", side)
    monkeypatch.setattr(fused_delta, "best_form", lambda plan, follower: way)
    monkeypatch.setattr(fused_delta, "beside_pays", lambda plan: True)
    check_followed(model)
    assert side.used == 4


def check_followed(model: CausalLM) -> None:
    """All four projections of a layer, with the Triton followers and with torch's after the whole layer."""
    block, hidden = model.model.layers[0], MODEL_CONFIG.hidden_size
    positions, slots = torch.arange(ROWS), torch.arange(ROWS)
    for path, width in (("self_attn.qkv_proj", hidden), ("mlp.gate_up_proj", hidden)):
        layer = block.get_submodule(path)
        assert isinstance(layer, BaseLinearLayerWithLoRA)
        x = torch.randn(ROWS, width)
        expected, actual = (
            _follower(path, followers, model, positions, slots) for followers in (TORCH_FOLLOWERS, TRITON)
        )
        plain = expected.plain(layer(x))
        torch.testing.assert_close(layer.followed_by(x, actual), plain, rtol=1e-4, atol=1e-4)
    for path, width in (("self_attn.o_proj", None), ("mlp.down_proj", MODEL_CONFIG.intermediate_size)):
        layer = block.get_submodule(path)
        assert isinstance(layer, BaseLinearLayerWithLoRA)
        x = torch.randn(ROWS, width or MODEL_CONFIG.num_heads * MODEL_CONFIG.head_dim)
        residuals = [torch.ones(ROWS, hidden) for _ in range(2)]
        plain = TORCH_FOLLOWERS.add_norm(residuals[0], model.model.norm).plain(layer(x))
        actual_out = layer.followed_by(x, TRITON.add_norm(residuals[1], model.model.norm))
        torch.testing.assert_close(actual_out, plain, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(residuals[1], residuals[0], rtol=1e-4, atol=1e-4)


def _follower(path: str, followers: object, model: CausalLM, positions: Tensor, slots: Tensor) -> Follower:
    assert isinstance(followers, TritonFollowers) or followers is TORCH_FOLLOWERS
    if path.endswith("gate_up_proj"):
        return followers.gated("silu")
    attention = model.model.layers[0].self_attn
    rotation = followers.rotation(model.model.rotary_emb, positions, torch.float32)
    cache = torch.zeros(2, 2, 4, MODEL_CONFIG.num_kv_heads, MODEL_CONFIG.head_dim)
    return followers.rotate(attention.heads, rotation, cache, slots)
