"""Adapters of mlx-lm become the PEFT adapter that they are, or are refused with what to do."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from adapter_store import DiskStore, InvalidAdapter, ModelSpec
from adapter_store.convert.folder import convert
from tests.support.adapters.expert_files import ExpertAdapter
from tests.support.adapters.foreign_files import as_mlx, write_mlx
from tests.support.adapters.moe_models import make_moe_base
from tests.support.adapters.peft import make_adapter, read_tensors, rewrite

NEWER = {"num_layers": 2}
A, B = torch.ones(64, 4), torch.ones(4, 64)
Q = "model.layers.1.self_attn.q_proj"


def converted(source: Path) -> Path:
    target = source.with_name("converted")
    convert(source, target)
    return target


def refusal(source: Path) -> str:
    with pytest.raises(InvalidAdapter) as caught:
        converted(source)
    assert not list(source.parent.glob("*converted*"))
    return str(caught.value)


def assert_equal(folder: Path, adapter: Path) -> None:
    found, wanted = read_tensors(folder), read_tensors(adapter)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lora(
    dense_adapter: Path, tmp_path: Path, dtype: torch.dtype, store: DiskStore, spec: ModelSpec
) -> None:
    peft = shutil.copytree(dense_adapter, tmp_path / "peft")
    rewrite(peft, lambda tensors: {name: t.to(dtype) for name, t in tensors.items()})
    mlx = as_mlx(tmp_path / "mlx", peft)
    (mlx / "chat_template.jinja").write_text("{{ messages }}")
    (mlx / "0000100_adapters.safetensors").write_bytes(b"a checkpoint")
    assert_equal(converted(mlx), peft)
    config = json.loads((tmp_path / "converted" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "mlx-community/d0-4bit"
    assert (config["r"], config["lora_alpha"], config["use_dora"]) == (4, 8, False)
    assert (tmp_path / "converted" / "chat_template.jinja").exists()
    (tmp_path / "converted" / "chat_template.jinja").unlink()
    assert (
        store.put(tmp_path / "converted", "acme", "x", spec).digest
        == store.put(peft, "acme", "y", spec).digest
    )


def test_dora(d0: Path, tmp_path: Path) -> None:
    peft = make_adapter(tmp_path / "peft", d0, seed=1, targets=["q_proj", "down_proj"], use_dora=True)
    assert_equal(converted(as_mlx(tmp_path / "mlx", peft, fine_tune_type="dora")), peft)
    assert json.loads((tmp_path / "converted" / "adapter_config.json").read_text())["use_dora"]


@pytest.mark.parametrize(("parent", "family"), [("mlp", "qwen3-moe"), ("block_sparse_moe", "mixtral")])
@pytest.mark.parametrize("stacked", [True, False], ids=["now", "before October 2025"])
def test_experts(tmp_path: Path, parent: str, family: str, stacked: bool, store: DiskStore) -> None:
    experts = ExpertAdapter.draw(4, 2, 64, 24)
    tensors = {}
    for layer, (a13, b13, a2, b2) in experts.layers.items():
        b1, b3 = b13.chunk(2, dim=1)
        for leaf, a, b in (("gate_proj", a13, b1), ("up_proj", a13, b3), ("down_proj", a2, b2)):
            path = f"model.layers.{layer}.{parent}.switch_mlp.{leaf}"
            tensors[f"{path}.lora_a"] = a.clone() if stacked else a.flatten(0, 1).clone()
            tensors[f"{path}.lora_b"] = b
    mlx = write_mlx(tmp_path / "mlx", tensors, 2, 4.0)  # one_by_one's alpha is 8
    peft = experts.one_by_one(tmp_path / "peft", parent)
    assert_equal(converted(mlx), peft)
    spec = ModelSpec.from_folder(make_moe_base(tmp_path / "base", family))
    assert store.put(tmp_path / "converted", "a", "x", spec).digest == store.put(peft, "a", "y", spec).digest


@pytest.mark.parametrize(
    ("parameters", "config", "alpha"),
    [
        ({"rank": 4, "scale": 20.0}, NEWER, 80),
        ({"rank": 4, "scale": 0.3}, NEWER, 0.3 * 4),
        ({"rank": 4, "scale": 10.0, "alpha": 16}, NEWER, 40),  # a default that nothing read
        ({"rank": 4, "scale": 10.0}, {"lora_layers": 2}, 40),
        ({"rank": 4, "scale": 10.0, "alpha": 4}, {"lora_layers": 2}, 40),  # the same either way
    ],
)
def test_scale(parameters: dict[str, Any], config: dict[str, Any], alpha: float, tmp_path: Path) -> None:
    mlx = write_mlx(tmp_path / "mlx", {f"{Q}.lora_a": A, f"{Q}.lora_b": B}, 4, 1.0)
    (mlx / "adapter_config.json").write_text(json.dumps({"lora_parameters": parameters} | config))
    assert json.loads((converted(mlx) / "adapter_config.json").read_text())["lora_alpha"] == alpha


def test_a_scale_that_two_versions_read_differently(tmp_path: Path) -> None:
    mlx = write_mlx(tmp_path / "mlx", {f"{Q}.lora_a": A, f"{Q}.lora_b": B}, 4, 1.0)
    old = {"lora_layers": 2, "lora_parameters": {"rank": 4, "scale": 10.0, "alpha": 16, "dropout": 0.0}}
    (mlx / "adapter_config.json").write_text(json.dumps(old))
    assert "before June 2024 (the scale is 40) and not later (it is 10): write the right one" in refusal(mlx)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"fine_tune_type": "full", "lora_parameters": None}, "fine_tune_type is 'full', only lora and dora"),
        ({"fine_tune_type": "dora"}, "do not agree on whether this is DoRA"),
        ({"lora_parameters": None}, "lora_parameters is missing"),
        ({"lora_parameters": {"rank": 4}}, "lora_parameters.scale is None"),
        ({"lora_parameters": {"rank": 4, "scale": float("inf")}}, "lora_parameters.scale is inf"),
        ({"lora_parameters": {"scale": 2.0}}, "lora_parameters.rank is None, not a positive integer"),
        ({"lora_parameters": {"rank": 8, "scale": 2.0}}, "has the ranks 4 and 4, the config says 8"),
        ({"peft_type": "LORA"}, "adapter_config.json is PEFT's, but adapters.safetensors is mlx-lm's"),
    ],
)
def test_configs_that_are_refused(config: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    mlx = write_mlx(tmp_path / "mlx", {f"{Q}.lora_a": A, f"{Q}.lora_b": B}, 4, 2.0, **config)
    assert complaint in refusal(mlx)


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({f"{Q}.lora_a": A}, f"{Q} has no lora_b"),
        ({f"{Q}.weight": B}, f"tensor '{Q}.weight' of adapters.safetensors is no part of a LoRA or DoRA"),
        ({"model.embed_tokens.lora_a": A}, "a tied lm_head, too"),
        ({f"{Q}.lora_a": A.long()}, "has dtype I64"),
        ({f"{Q}.lora_a": A[0], f"{Q}.lora_b": B}, "are no pair"),
        ({f"{Q}.lora_a": A[None], f"{Q}.lora_b": B[None]}, "LoRA of these experts is not converted"),
        (
            {"model.layers.0.mlp.switch_mlp.up_proj.lora_a": torch.ones(4, 2, 64)}
            | {"model.layers.0.mlp.switch_mlp.up_proj.lora_b": torch.ones(2, 24, 4)},
            "are no pair of rank 4",
        ),
    ],
)
def test_tensors_that_are_refused(tensors: dict[str, torch.Tensor], complaint: str, tmp_path: Path) -> None:
    assert complaint in refusal(write_mlx(tmp_path / "mlx", tensors, 4, 2.0))
