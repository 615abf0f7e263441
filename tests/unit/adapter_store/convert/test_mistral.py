"""Adapters of mistral-finetune become the PEFT adapter that they are, or are refused with what to do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.mistral.modeling_mistral import apply_rotary_pos_emb

from adapter_store import DiskStore, InvalidAdapter, ModelSpec
from adapter_store.convert.folder import convert
from tests.support.adapters.expert_files import ExpertAdapter
from tests.support.adapters.foreign_files import as_mistral
from tests.support.adapters.moe_models import make_moe_base
from tests.support.adapters.peft import read_tensors

D0 = {"heads": 4, "kv_heads": 2, "head_dim": 16}


def refusal(source: Path) -> str:
    target = source.with_name("converted")
    with pytest.raises(InvalidAdapter) as caught:
        convert(source, target)
    assert not target.exists()
    return str(caught.value)


def edit(folder: Path, **fields: Any) -> None:
    file = folder / "params.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.fixture
def mistral(tmp_path: Path, dense_adapter: Path) -> Path:
    return as_mistral(tmp_path / "mistral", dense_adapter, **D0)


def test_lora(mistral: Path, dense_adapter: Path, store: DiskStore, spec: ModelSpec) -> None:
    target = mistral.with_name("converted")
    convert(mistral, target)
    found, wanted = read_tensors(target), read_tensors(dense_adapter)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert store.put(target, "a", "x", spec).digest == store.put(dense_adapter, "a", "y", spec).digest


def test_scores_are_those_of_mistrals_own_rotation(mistral: Path) -> None:
    """q k of one head and all pairs of positions, by Mistral's complex numbers and by transformers."""
    convert(mistral, mistral.with_name("converted"))
    ours, theirs = read_tensors(mistral.with_name("converted")), load_file(mistral / "lora.safetensors")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 64, generator=generator, dtype=torch.float64)
    angles = torch.outer(torch.arange(5.0), 100.0 ** (-torch.arange(0, 16, 2) / 16)).double()

    def head(tensors: dict[str, torch.Tensor], a: str, b: str) -> torch.Tensor:
        return x @ tensors[a].double().T @ tensors[b].double().T[:, 16:32]

    def turned(rows: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(rows.reshape(5, 8, 2)) * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(pairs).flatten(1)

    q, k = (
        head(theirs, *(f"layers.0.attention.{place}.lora_{half}.weight" for half in "AB"))
        for place in ("wq", "wk")
    )
    expected = turned(q) @ turned(k).T
    path = "base_model.model.model.layers.0.self_attn"
    q, k = (
        head(ours, *(f"{path}.{place}.lora_{half}.weight" for half in "AB"))[None, None]
        for place in ("q_proj", "k_proj")
    )
    wide = torch.cat([angles, angles], -1)[None]
    q, k = apply_rotary_pos_emb(q, k, wide.cos(), wide.sin())
    torch.testing.assert_close((q @ k.transpose(2, 3))[0, 0], expected)


def test_experts(tmp_path: Path, store: DiskStore) -> None:
    peft = ExpertAdapter.draw(4, 4, 64, 24).one_by_one(tmp_path / "peft", "block_sparse_moe")
    convert(as_mistral(tmp_path / "mistral", peft, **D0), tmp_path / "converted")
    found, wanted = read_tensors(tmp_path / "converted"), read_tensors(peft)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    spec = ModelSpec.from_folder(make_moe_base(tmp_path / "base", "mixtral"))
    assert store.put(tmp_path / "converted", "a", "x", spec).digest == store.put(peft, "a", "y", spec).digest


@pytest.mark.parametrize(
    "name", ["norm.weight", "layers.0.attention_norm.weight", "tok_embeddings.weight", "output.weight"]
)
def test_other_trained_weights_are_refused_by_name(mistral: Path, name: str) -> None:
    tensors = load_file(mistral / "lora.safetensors")
    save_file(tensors | {name: torch.ones(64)}, mistral / "lora.safetensors")
    assert f"tensor '{name}' of lora.safetensors is no LoRA of attention" in refusal(mistral)


def test_a_half_alone(mistral: Path) -> None:
    tensors = load_file(mistral / "lora.safetensors")
    del tensors["layers.1.attention.wo.lora_B.weight"]
    save_file(tensors, mistral / "lora.safetensors")
    assert "model.layers.1.self_attn.o_proj has no lora_B" in refusal(mistral)


@pytest.mark.parametrize(
    ("params", "complaint"),
    [
        ({"lora": None}, "params.json: lora is missing, which says rank and scaling"),
        ({"lora": {"rank": 4}}, "lora.scaling is None"),
        ({"lora": {"rank": 16, "scaling": 2.0}}, "has the ranks 4 and 4, the config says 16"),
        ({"head_dim": None}, "head_dim is None"),
        ({"n_kv_heads": 4}, "has 32 rows, params.json says 4 heads of 16"),
    ],
)
def test_params_that_are_refused(mistral: Path, params: dict[str, Any], complaint: str) -> None:
    edit(mistral, **params)
    assert complaint in refusal(mistral)


def test_params_that_are_missing(mistral: Path) -> None:
    (mistral / "params.json").unlink()
    assert "params.json is missing" in refusal(mistral)


# ---- which form it is


def test_a_mixture_is_told(mistral: Path, dense_adapter: Path) -> None:
    (mistral / "adapters.safetensors").write_bytes(b"")
    assert "mistral has adapters.safetensors and lora.safetensors, of several adapters" in refusal(mistral)
    (mistral / "adapters.safetensors").rename(mistral / "adapter_model.safetensors")
    assert "adapter_model.safetensors and lora.safetensors, of several" in refusal(mistral)
    (mistral / "lora.safetensors").unlink()
    assert "has adapter_model.safetensors already: push it as it is" in refusal(mistral)


def test_weights_that_would_be_left_behind(mistral: Path) -> None:
    (mistral / "non_lora_trainables.bin").write_bytes(b"")
    assert "non_lora_trainables.bin holds trained weights" in refusal(mistral)


def test_what_is_no_known_form(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "has none of adapter_model.bin, adapters.safetensors, lora.safetensors" in refusal(
        tmp_path / "empty"
    )
    (tmp_path / "empty" / "lora.gguf").write_bytes(b"GGUF")
    assert "lora.gguf is llama.cpp's" in refusal(tmp_path / "empty")
