"""The list of served families says what executors read; a family that is not served is told the nearest."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from adapter_store import InvalidModel
from adapter_store.base.config import BaseConfig
from adapter_store.base.families import FAMILIES
from adapter_store.base.traits import DESCRIBED
from executor.layers.model_config import ModelConfig
from executor.models import read_config
from lorafleet.cli import main

# Fields of ModelConfig that are sizes, or of one config more than of its family.
NO_TRAITS = {
    "architecture", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
    "num_kv_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling", "max_position_embeddings",
    "eos_token_ids",
}  # fmt: skip


def traits_of(config: ModelConfig, plain: ModelConfig) -> set[str]:
    """Where a config differs from a Llama's."""
    names = {field.name for field in fields(ModelConfig)} - NO_TRAITS
    found = {name for name in names if getattr(config, name) != getattr(plain, name)} - {"windows"}
    return found | ({"windows"} if any(config.windows) else set())


def read(folder: Path, architecture: str) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    return read_config(folder)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_list_says_what_is_read(architecture: str, tmp_path: Path) -> None:
    config, plain = read(tmp_path, architecture), read(tmp_path, "LlamaForCausalLM")
    assert set(DESCRIBED[architecture].traits) == traits_of(config, plain)


def test_all_families_are_listed_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert DESCRIBED.keys() == FAMILIES.keys()
    assert main(["models", "--families"]) == 0
    table = capsys.readouterr().out
    assert all(architecture in table for architecture in FAMILIES)
    assert "soft_caps" in table
    assert main(["models", "--families", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["Olmo2ForCausalLM"]["published"] == "OLMo 2"


@pytest.mark.parametrize(
    ("architecture", "near"),
    [
        ("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"),
        ("GraniteMoeForCausalLM", "GraniteForCausalLM"),
        ("Qwen3NextForCausalLM", "Qwen3ForCausalLM"),
    ],
)
def test_what_is_not_served_is_told_the_nearest(architecture: str, near: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    with pytest.raises(InvalidModel, match=rf"{architecture}.* not served; the nearest is {near}, .*Llama"):
        BaseConfig.from_folder(tmp_path)
