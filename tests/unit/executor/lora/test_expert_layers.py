"""Experts with LoRA on 1, 2 and 4 ranks equal the whole layer: experts cut, adapters sharded, experts shared
out."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from executor.distributed import SINGLE
from executor.layers.fused_moe_router import route
from executor.layers.model_config import MoEConfig
from executor.lora.errors import ModuleShapeMismatch, RankTooLarge
from tests.support.engines.ranks import RankPool, rank_pool
from tests.unit.executor.lora import expert_checks
from tests.unit.executor.lora.expert_checks import EXPERTS, FORMS, HIDDEN, INNER, MAX_RANK, make_rig

SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool(*SIZES) as ranks:
        yield ranks


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("check", expert_checks.EVERY_CHECK, ids=lambda check: check.__name__)
def test_equals_the_whole_layer(pool: RankPool, check: Callable[..., None], form: str, size: int) -> None:
    pool.run(size, check, form)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", [name for name, form in FORMS.items() if len(form.names) == 3])
def test_one_pair_for_gate_and_up(pool: RankPool, form: str, size: int) -> None:
    pool.run(size, expert_checks.one_pair_for_gate_and_up, form)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are interpreted")
@pytest.mark.parametrize("form", ["w1, w2, w3", "w13, w2"])
def test_the_triton_kernels_read_slots_as_they_lie(form: str) -> None:
    """With the rank as the outer axis and the experts side by side."""
    punica_gpu = pytest.importorskip("kernels.punica_gpu")
    expert_checks.mixed_ranks(SINGLE, form, punica_gpu.PunicaWrapperGPU)
    expert_checks.fp8_slots(SINGLE, form, punica_gpu.PunicaWrapperGPU)


def test_experts_without_a_gate_equal_those_of_transformers() -> None:
    """Nemotron-H's, with each adapter merged into their matrices."""
    rig = make_rig(SINGLE, "w1, w2", 1)
    base = rig.layer.base_layer
    assert base.w13_bias is not None and base.w2_bias is not None
    base.w13_bias.zero_()
    base.w2_bias.zero_()
    sizes = SimpleNamespace(
        n_routed_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=INNER,
        moe_latent_size=None, mlp_hidden_act="relu2", _experts_implementation="eager",
    )  # fmt: skip
    theirs = NemotronHExperts(sizes).requires_grad_(False)
    rig.put(0, factors := rig.draw([3, 5]))
    matrices = (theirs.up_proj, base.w13), (theirs.down_proj, base.w2)
    for (merged, weight), adapter in zip(matrices, factors, strict=True):
        assert adapter is not None
        a, b, scale = adapter
        merged.copy_(weight + scale * b @ a)
    x, routing = torch.randn(6, HIDDEN), route(torch.randn(6, EXPERTS), 2, renormalize=True)
    expected = theirs(x, routing.ids, routing.weights)
    torch.testing.assert_close(rig.run([(0, 6)], x, routing), expected, rtol=1e-5, atol=1e-5)


def test_experts_without_a_gate_have_nothing_to_interleave() -> None:
    with pytest.raises(ValueError, match="without a gate"):
        MoEConfig((True,), EXPERTS, 2, INNER, True, interleaved=True, gated=False)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", [name for name, form in FORMS.items() if not form.fully_sharded])
def test_fp8_slots(pool: RankPool, form: str, size: int) -> None:
    pool.run(size, expert_checks.fp8_slots, form)


def test_no_image_fits_another_rank_size_or_cut(pool: RankPool) -> None:
    """But for a single rank's, which are cut in no way."""
    for interleaved in (False, True):
        names = [name for name, form in FORMS.items() if form.interleaved == interleaved]
        several = [
            layout
            for size in SIZES[1:]
            for name in names
            for layout, _ in pool.run(size, expert_checks.layouts, name)
        ]
        assert len(set(several)) == len(several) == len(names) * sum(SIZES[1:])


def test_every_cut_makes_slots_smaller(pool: RankPool) -> None:
    for form in FORMS:
        whole, half, quarter = (pool.run(size, expert_checks.layouts, form)[0][1] for size in SIZES)
        assert quarter < half < whole


def test_what_does_not_fit_is_refused_with_the_slot_unchanged() -> None:
    layer = make_rig(SINGLE, "w1, w2, w3", 1).layer

    def pair(rank: int, wide: int, high: int, experts: int = EXPERTS) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(experts, rank, wide), torch.ones(experts, high, rank)

    a, b = pair(2, HIDDEN, INNER)
    layer.set_lora(0, [a, None, None], [b, None, None])
    for error, text, (left, right) in (
        (RankTooLarge, f"rank {MAX_RANK + 1}", pair(MAX_RANK + 1, HIDDEN, INNER)),
        (ModuleShapeMismatch, r"w1\.lora_a", pair(2, HIDDEN + 1, INNER)),
        (ModuleShapeMismatch, r"w1\.lora_b", pair(2, HIDDEN, INNER - 1)),
        (ModuleShapeMismatch, r"w1\.lora_a", pair(2, HIDDEN, INNER, experts=3)),
        (ModuleShapeMismatch, r"w1\.lora_a", (a[0], b[0])),
    ):
        with pytest.raises(error, match=text):
            layer.set_lora(0, [left, None, None], [right, None, None])
        assert layer.stacked.ranks[:, 0].tolist() == [2, 0, 0]
