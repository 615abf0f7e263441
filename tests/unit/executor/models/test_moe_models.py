"""Models with experts: logits of transformers, checkpoints in every layout, and configs that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapter_store import InvalidModel
from executor.distributed import ParallelGroup
from executor.errors import BadCheckpoint, UnsupportedModel
from executor.layers.attention import KVCache
from executor.models import load_model, read_config
from executor.step.inputs import SequenceRows, build_step
from tests.support.adapters.moe_models import make_moe_base
from tests.support.adapters.tiny_models import reference_logits

FILE = "model.safetensors"
TOKENS = [int(i) for i in torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(0))]
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 24}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "mixtral-window": ("mixtral", {"sliding_window": 8, "num_experts_per_tok": 3}),
    "qwen2-moe": ("qwen2-moe", {}),
    "qwen2-moe-windows": (
        "qwen2-moe",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "norm_topk_prob": True},
    ),
    "qwen2-moe-some-dense": ("qwen2-moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2}),
    "qwen3-moe": ("qwen3-moe", {"norm_topk_prob": False, "tie_word_embeddings": True}),
    "qwen3-moe-window": ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 8}),
    "qwen3-moe-first-dense": ("qwen3-moe", {"mlp_only_layers": [0]}),
    "gpt-oss": ("gpt-oss", {}),
    "gpt-oss-yarn": ("gpt-oss", {"rope_parameters": {**YARN, "truncate": False}, "swiglu_limit": 0.5}),
    "gpt-oss-full": ("gpt-oss", {"layer_types": ["full_attention", "full_attention"]}),
}


def logits(folder: Path) -> Tensor:
    """In two steps, so that the second one reads the first one's keys."""
    model = load_model(folder, torch.float32, "cpu")
    cache, out = KVCache.allocate(16, 4, model.config, torch.float32, "cpu"), []
    for start, stop in ((0, 25), (25, 40)):
        rows = SequenceRows(TOKENS[start:stop], start, list(range(10)), -1, list(range(stop - start)))
        token_ids, ctx = build_step([rows], cache, None)
        out.append(model.compute_logits(model(token_ids, ctx), ctx))
    return torch.cat(out)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    folder = make_moe_base(tmp_path, family, **overrides)
    torch.testing.assert_close(logits(folder), reference_logits(folder, TOKENS), rtol=1e-4, atol=2e-4)


def fuse(folder: Path) -> None:
    """Experts in one tensor a layer, as transformers holds them in memory."""
    tensors = load_file(folder / FILE)
    for layer in range(2):
        path = f"model.layers.{layer}.mlp.experts"

        def taken(leaf: str, path: str = path) -> Tensor:
            return torch.stack([tensors.pop(f"{path}.{expert}.{leaf}.weight") for expert in range(4)])

        tensors[f"{path}.gate_up_proj"] = torch.cat((taken("gate_proj"), taken("up_proj")), dim=1)
        tensors[f"{path}.down_proj"] = taken("down_proj")
    save_file(tensors, folder / FILE)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_both_layouts_fill_the_same_parameters(size: int, expert_parallel: bool, tmp_path: Path) -> None:
    folder = make_moe_base(tmp_path, "qwen3-moe")
    groups = [ParallelGroup(rank, size) for rank in range(size)]

    def loaded() -> list[dict[str, Tensor]]:
        return [
            dict(
                load_model(
                    folder, torch.float32, "cpu", group, expert_parallel=expert_parallel
                ).named_parameters()
            )
            for group in groups
        ]

    apart = loaded()
    fuse(folder)
    for rank, (first, second) in enumerate(zip(apart, loaded(), strict=True)):
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first), rank
    experts = [model["model.layers.1.mlp.experts.w2"] for model in apart]
    assert torch.cat(experts, dim=0 if expert_parallel else 2).shape == (4, 64, 24)


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("expert", [0, 1, 3])
def test_a_missing_expert_is_named(expert: int, expert_parallel: bool, tmp_path: Path) -> None:
    """On the rank that wants it."""
    folder = make_moe_base(tmp_path, "mixtral")
    tensors = load_file(folder / FILE)
    del tensors[f"model.layers.1.block_sparse_moe.experts.{expert}.w3.weight"]
    save_file(tensors, folder / FILE)
    rank = expert // 2 if expert_parallel else 0
    with pytest.raises(BadCheckpoint, match=rf"1 tensors are missing: .*layers\.1.*experts\.{expert}\.w3"):
        load_model(folder, torch.float32, "cpu", ParallelGroup(rank, 2), expert_parallel=expert_parallel)


def test_an_expert_too_many_is_named(tmp_path: Path) -> None:
    folder = make_moe_base(tmp_path, "mixtral")
    tensors = load_file(folder / FILE)
    name = "model.layers.1.block_sparse_moe.experts.4.w3.weight"
    save_file({**tensors, name: torch.zeros(24, 64)}, folder / FILE)
    with pytest.raises(BadCheckpoint, match=rf"{name} has no place"):
        load_model(folder, torch.float32, "cpu")


@pytest.mark.parametrize(
    ("family", "size", "expert_parallel", "possible"),
    [("mixtral", 4, False, True), ("qwen2-moe", 3, False, False), ("gpt-oss", 8, True, False)],
)
def test_what_ranks_cannot_share_is_refused(
    family: str, size: int, expert_parallel: bool, possible: bool, tmp_path: Path
) -> None:
    folder = make_moe_base(tmp_path, family)
    group = ParallelGroup(0, size)
    if possible:
        load_model(folder, torch.float32, "cpu", group, expert_parallel=expert_parallel)
        return
    with pytest.raises(UnsupportedModel, match=r"4 experts of 24\): possible are 1, 2, 4"):
        load_model(folder, torch.float32, "cpu", group, expert_parallel=expert_parallel)


@pytest.mark.parametrize(
    ("family", "fields", "error", "text"),
    [
        ("gpt-oss", {"layer_types": ["linear_attention"] * 2}, UnsupportedModel, "layer_types"),
        ("gpt-oss", {"sliding_window": None}, UnsupportedModel, "sliding_attention needs"),
        ("mixtral", {"num_experts_per_tok": 0}, InvalidModel, "num_experts_per_tok"),
        ("mixtral", {"hidden_act": "gelu"}, UnsupportedModel, "hidden_act"),
    ],
)
def test_other_configs_are_refused_by_name(
    family: str, fields: dict[str, Any], error: type[Exception], text: str, tmp_path: Path
) -> None:
    folder = make_moe_base(tmp_path, family)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(error, match=text):
        read_config(folder)
