import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from adapter_store import InvalidModel, ModelSpec
from executor.models import load_model
from tests.support.adapters.moe_models import make_moe_base
from tests.support.adapters.peft import CONFIGS, Kind, make_base


@pytest.fixture
def base(tmp_path: Path, d0: Path) -> Path:
    """A copy of D0 to damage."""
    return shutil.copytree(d0, tmp_path / "base")


def edit(base: Path, **fields: Any) -> None:
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | fields))


def test_d0(d0: Path, spec: ModelSpec) -> None:
    assert (spec.architecture, spec.name, spec.num_layers) == ("LlamaForCausalLM", "d0", 2)
    assert (spec.vocab_size, spec.hidden_size, spec.max_model_len, spec.tied_head) == (128, 64, 512, False)
    assert spec.modules == {
        "q_proj": (64, 64),
        "k_proj": (64, 32),
        "v_proj": (64, 32),
        "o_proj": (64, 64),
        "gate_proj": (64, 96),
        "up_proj": (64, 96),
        "down_proj": (96, 64),
        "embed_tokens": (128, 64),
        "lm_head": (64, 128),
    }


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_family_tied_sharded_and_with_a_free_head_dim(tmp_path: Path, kind: Kind) -> None:
    base = make_base(tmp_path / kind, kind, tied=True, head_dim=32, shard_size="50KB")
    assert (base / "model.safetensors.index.json").exists()
    spec = ModelSpec.from_folder(base)
    assert spec.tied_head
    # Qwen2 has no head_dim of its own in older transformers; what counts is that config and weights agree.
    query = spec.modules["q_proj"] if "q_proj" in spec.modules else spec.modules["qkv_proj"]
    assert query == (64, 128 if "q_proj" in spec.modules else 128 + 2 * 64)


def test_the_head_dim_is_derived_when_the_config_has_none(base: Path) -> None:
    config = json.loads((base / "config.json").read_text())
    del config["head_dim"]
    (base / "config.json").write_text(json.dumps(config))
    assert ModelSpec.from_folder(base).modules["k_proj"] == (64, 32)


def test_qwen3_has_heads_of_128_when_the_config_does_not_say(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "qwen3", head_dim=128)
    config = json.loads((base / "config.json").read_text())
    del config["head_dim"]
    (base / "config.json").write_text(json.dumps(config))
    assert ModelSpec.from_folder(base).modules["q_proj"] == (64, 512)
    assert load_model(base, torch.float32, "cpu").config.head_dim == 128


def test_layers_with_experts_are_said_by_a_list_of_numbers(tmp_path: Path) -> None:
    base = make_moe_base(tmp_path / "base", "qwen3-moe")
    for dense in ("none", [0, 1], ["1"]):
        edit(base, mlp_only_layers=dense)
        with pytest.raises(InvalidModel, match="mlp_only_layers must be a list"):
            ModelSpec.from_folder(base)


def test_the_fingerprint_follows_config_tokenizer_and_tensor_headers(base: Path, spec: ModelSpec) -> None:
    assert ModelSpec.from_folder(base).fingerprint == spec.fingerprint
    shuffled = dict(reversed(json.loads((base / "config.json").read_text()).items()))
    (base / "config.json").write_text(json.dumps(shuffled, indent=7))
    seen = [spec.fingerprint, ModelSpec.from_folder(base).fingerprint]
    assert seen[0] == seen[1]
    (base / "tokenizer.json").write_text("{}")
    seen.append(ModelSpec.from_folder(base).fingerprint)
    edit(base, rope_theta=5.0)
    seen.append(ModelSpec.from_folder(base).fingerprint)
    shutil.copy(make_base(base.parent / "bf16", dtype=torch.bfloat16) / "model.safetensors", base)
    seen.append(ModelSpec.from_folder(base).fingerprint)
    assert len(set(seen)) == 4


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "DeepseekV3ForCausalLM"),
        ({"architectures": None}, "architectures None"),
        ({"architectures": ["LlamaForCausalLM", "LlamaForCausalLM"]}, "architectures"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must be a divisor of num_attention_heads = 4"),
        ({"head_dim": None, "num_attention_heads": 6, "num_key_value_heads": 6}, "hidden_size"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"vocab_size": True}, "vocab_size must be a positive integer"),
        ({"rope_scaling": [1]}, "rope_scaling must be one flat object"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"transformers_weights": "other.safetensors"}, "transformers_weights"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 3}, r"model\.layers\.2\.self_attn\.q_proj\.weight"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"vocab_size": 129}, r"embed_tokens\.weight"),
        ({"head_dim": 8}, r"q_proj\.weight"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
    ],
)
def test_bad_configs_are_refused_by_name(base: Path, fields: dict[str, Any], complaint: str) -> None:
    edit(base, **fields)
    with pytest.raises(InvalidModel, match=complaint):
        ModelSpec.from_folder(base)


def test_an_untied_base_without_a_head_is_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path / "tied", tied=True)
    edit(base, tie_word_embeddings=False)
    with pytest.raises(InvalidModel, match=r"lm_head\.weight"):
        ModelSpec.from_folder(base)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize(
    "content", [None, b"", b"[]", b"\xff\xff\xff", b"version https://git-lfs.github.com/spec/v1\n"]
)
def test_damaged_files_are_refused_by_name(base: Path, name: str, content: bytes | None) -> None:
    (base / name).unlink() if content is None else (base / name).write_bytes(content)
    with pytest.raises(InvalidModel, match=name):
        ModelSpec.from_folder(base)
