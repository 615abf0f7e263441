"""The factors of DoRA, and what a slot leaves behind. That answers equal PEFT's is in tests/fidelity."""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from adapter_store import LoRAModule, Weights
from executor.lora.arena import TensorCopy
from executor.lora.config import LoRAConfig
from executor.lora.dora import DoRAFactors, output_factors
from executor.lora.errors import DoRANotServed, NonFiniteWeights
from executor.lora.image import build_slot_image
from executor.lora.replace import attach_lora
from executor.models import CausalLM, load_model
from kernels.metadata.meta import LoRAMapping
from kernels.punica import PunicaWrapperBase, PunicaWrapperCPU
from kernels.punica_gpu import PunicaWrapperGPU
from tests.support.adapters.peft import make_base

RANK, SLOTS = 3, 2
Q, DOWN = "layers.0.q_proj", "layers.1.down_proj"


def module(name: str, inputs: int, outputs: int, seed: int, *, dora: bool) -> LoRAModule:
    draw = np.random.default_rng(seed)
    a, b = draw.standard_normal((RANK, inputs)), draw.standard_normal((RANK, outputs))
    magnitude = draw.uniform(0.5, 2, outputs).astype(np.float32) if dora else None
    return LoRAModule(name, RANK, 0.5, a.astype(np.float32), b.astype(np.float32), magnitude)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture
def model(model_folder: Path) -> CausalLM:
    return load_model(model_folder, torch.float32, "cpu")


def test_factors_are_magnitudes_over_norms_of_rows() -> None:
    weight = torch.randn(2500, 40, generator=torch.Generator().manual_seed(0))  # several chunks
    part = module(Q, 40, 2500, seed=1, dora=True)
    whole = weight.double().numpy() + 0.5 * part.lora_b.astype(np.float64).T @ part.lora_a
    expected = part.magnitude / np.linalg.norm(whole, axis=1)
    assert np.allclose(output_factors(weight, part).numpy(), expected, rtol=1e-5)


def test_a_row_without_a_norm_is_refused() -> None:
    part = LoRAModule(Q, 1, 1.0, np.zeros((1, 4), np.float32), np.ones((1, 3), np.float32), np.ones(3))
    with pytest.raises(NonFiniteWeights, match="magnitude"):
        output_factors(torch.zeros(3, 4), part)


def test_who_sees_to_no_magnitudes_refuses_them(model: CausalLM) -> None:
    punica = PunicaWrapperCPU(SLOTS, 8)
    arena = attach_lora(model, LoRAConfig(SLOTS, RANK), punica).arena
    with pytest.raises(DoRANotServed, match=Q):
        build_slot_image({Q: module(Q, 64, 64, seed=1, dora=True)}, arena.layout)


@pytest.mark.parametrize("kernels", [PunicaWrapperCPU, PunicaWrapperGPU], ids=["reference", "interpreted"])
def test_rows_of_each_slot_and_what_is_left_of_them(
    model: CausalLM, kernels: type[PunicaWrapperBase]
) -> None:
    plain = {Q: module(Q, 64, 64, seed=1, dora=False)}
    dora = {Q: module(Q, 64, 64, seed=2, dora=True), DOWN: module(DOWN, 96, 64, seed=3, dora=True)}
    punica = kernels(SLOTS, 8, "cpu")
    arena = attach_lora(model, LoRAConfig(SLOTS, RANK), punica).arena
    factors = DoRAFactors(model, SLOTS)
    layer = model.model.layers[0].self_attn.qkv_proj
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))

    def run(*runs: tuple[int, int]) -> torch.Tensor:
        punica.update_metadata(LoRAMapping(runs, runs))
        with torch.inference_mode():
            return layer(x)

    def load(slot: int, adapter: Mapping[str, LoRAModule]) -> None:
        arena.load(slot, build_slot_image(adapter, arena.layout, with_dora=True))
        make(factors.enter(slot, factors.of("", cast(Weights, adapter))))

    def make(copies: list[TensorCopy]) -> None:
        for target, source in copies:
            target.copy_(source)

    def expected(adapter: Mapping[str, LoRAModule]) -> torch.Tensor:
        y = torch.nn.functional.linear(x, layer.base_layer.weight)
        part = adapter[Q]
        y[:, :64] += 0.5 * x @ torch.from_numpy(part.lora_a).T @ torch.from_numpy(part.lora_b)
        if part.magnitude is not None:
            y[:, :64] *= output_factors(layer.base_layer.weight[:64], part)
        return y + layer.base_layer.bias

    base = run((-1, 6))
    load(0, dora)
    load(1, plain)
    mixed = run((0, 2), (-1, 1), (1, 2), (0, 1))
    for rows, truth in (([0, 1, 5], expected(dora)), ([2], base), ([3, 4], expected(plain))):
        torch.testing.assert_close(mixed[rows], truth[rows], rtol=1e-5, atol=1e-5)
    load(0, plain)  # nothing of the factors stays, also in a step of others with factors
    load(1, dora)
    with factors.marks.as_if_all():
        alone = run((0, 6))
    for rows, got in ((range(6), alone), ([0, 1, 4], run((0, 2), (1, 2), (0, 1), (-1, 1))[[0, 1, 4]])):
        torch.testing.assert_close(got, expected(plain)[rows], rtol=1e-5, atol=1e-5)
    load(0, dora)
    arena.clear(0)
    make(factors.clear(0))
    assert torch.equal(run((0, 4), (1, 2))[:4], base[:4])


def test_factors_are_kept_by_adapter_and_base(
    model: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = {f"sha256:{i:064x}": {Q: module(Q, 64, 64, seed=i, dora=True)} for i in range(2)}
    attach_lora(model, LoRAConfig(SLOTS, RANK), PunicaWrapperCPU(SLOTS, 8))
    first, second = adapters

    def load(digest: str) -> torch.Tensor:
        factors = DoRAFactors(model, SLOTS, tmp_path / "factors")
        row = factors.of(digest, cast(Weights, adapters[digest]))
        assert row is not None
        return row

    computed = [load(first), load(second)]
    assert not torch.equal(*computed)
    with monkeypatch.context() as context:
        context.setattr("executor.lora.dora.output_factors", lambda *_: pytest.fail("computed again"))
        assert torch.equal(load(first), computed[0]) and torch.equal(load(second), computed[1])
    files = sorted((tmp_path / "factors").iterdir())
    assert len(files) == 2
    files[0].write_bytes(files[0].read_bytes()[:-1] + b"x")  # damaged: computed again
    assert torch.equal(load(first), computed[0])
    with torch.no_grad():
        model.model.layers[0].self_attn.qkv_proj.base_layer.weight[0, 0] += 1
    assert not torch.equal(load(first), computed[0])  # another base
    assert len(list((tmp_path / "factors").iterdir())) == 3
