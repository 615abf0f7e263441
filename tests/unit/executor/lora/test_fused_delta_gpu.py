"""A pair whose shrink runs on the second stream of a real GPU, eagerly and captured, as prompts take it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from executor.layers.followers import TORCH_FOLLOWERS
from executor.layers.triton_followers import TritonFollowers
from executor.lora import fused_delta
from executor.lora.config import LoRAConfig
from executor.lora.image import build_slot_image
from executor.lora.layers import BaseLinearLayerWithLoRA
from executor.lora.replace import attach_lora
from executor.models import CausalLM
from kernels.launching.follower_tuning import beside_pays, best_form
from kernels.metadata.meta import LoRAMapping
from kernels.punica_gpu import PunicaWrapperGPU
from tests.unit.executor.lora.adapters import make_adapter, poison
from tests.unit.executor.lora.layer_cases import MODEL_CONFIG as NARROW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SLOTS, ROWS = 4, 130 * 64
MODEL_CONFIG = replace(NARROW, hidden_size=256, intermediate_size=384, head_dim=64)


@pytest.fixture(scope="module")
def served() -> tuple[CausalLM, PunicaWrapperGPU]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = CausalLM(MODEL_CONFIG).to(torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    punica = PunicaWrapperGPU(SLOTS, ROWS, "cuda")
    arena = attach_lora(model, LoRAConfig(SLOTS, 16, dtype=torch.bfloat16), punica).arena
    for slot in range(SLOTS):
        poison(arena, slot)
        ranks = dict.fromkeys((part.module for part in arena.layout.slices), 16 - slot)
        arena.load(slot, build_slot_image(make_adapter(arena.layout, ranks, slot), arena.layout))
        punica.set_slot_rank(slot, 16 - slot)
    punica.update_metadata(LoRAMapping(((0, ROWS // 2), (-1, 9), (2, ROWS // 2 - 9)), ()))
    return model, punica


def in_graph(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


@pytest.mark.parametrize("path", ["self_attn.o_proj", "mlp.down_proj"])
def test_a_prompts_pair_with_its_shrink_beside_the_product(
    served: tuple[CausalLM, PunicaWrapperGPU], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    model, punica = served
    plan = punica.token_mapping_meta.plan
    assert beside_pays(plan) and best_form(plan, "add_rms_norm") == "pair"
    taken: list[object] = []
    beside = fused_delta.add_pair_beside

    def counted(*arguments: object) -> Tensor:
        taken.append(arguments)
        return beside(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(fused_delta, "add_pair_beside", counted)
    layer, norm = model.model.layers[0].get_submodule(path), model.model.norm
    assert isinstance(layer, BaseLinearLayerWithLoRA)
    x = torch.empty(ROWS, layer.base_layer.input_size, device="cuda", dtype=torch.bfloat16)
    residual = torch.zeros(ROWS, MODEL_CONFIG.hidden_size, device="cuda", dtype=torch.bfloat16)

    def call() -> Tensor:
        return layer.followed_by(x, TritonFollowers().add_norm(residual, norm))

    graph, out = in_graph(call)
    assert len(taken) == 2
    for seed in range(3):
        torch.manual_seed(seed)
        x.normal_()
        expected_residual = torch.zeros_like(residual)
        expected = TORCH_FOLLOWERS.add_norm(expected_residual, norm).plain(layer(x))
        for run in (graph.replay, lambda: out.copy_(call())):
            residual.zero_()
            out.fill_(float("nan"))
            run()
            for got, wanted in ((out, expected), (residual, expected_residual)):
                assert (got - wanted).float().norm() < 1e-2 * wanted.float().norm()
