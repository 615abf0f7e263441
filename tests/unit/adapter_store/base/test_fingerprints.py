"""A base's fingerprint stays what it is: a scheduler and an executor of different releases meet by it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from adapter_store import ModelSpec
from adapter_store.base.checkpoint import INDEX_FILE, SINGLE_FILE

SIZES: Mapping[str, Any] = {
    "vocab_size": 6,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 12,
    "max_position_embeddings": 32,
}
SHAPES: Mapping[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (6, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (6, 8),
    **{f"model.layers.0.self_attn.{name}_proj.weight": (8, 8) for name in "qo"},
    **{f"model.layers.0.self_attn.{name}_proj.weight": (4, 8) for name in "kv"},
}
DENSE = {f"model.layers.0.mlp.{name}_proj.weight": (12, 8) for name in ("gate", "up")} | {
    "model.layers.0.mlp.down_proj.weight": (8, 12)
}
EXPERTS = {"model.layers.0.block_sparse_moe.gate.weight": (2, 8)} | {
    f"model.layers.0.block_sparse_moe.experts.{expert}.{name}.weight": (8, 12) if name == "w2" else (12, 8)
    for expert in range(2)
    for name in ("w1", "w2", "w3")
}


def write_config(folder: Path, architecture: str, **fields: Any) -> None:
    config = {"architectures": [architecture], **SIZES, **fields}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def write_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]], shards: int = 1) -> None:
    tensors = {name: np.zeros(shape, np.float16) for name, shape in {**SHAPES, **shapes}.items()}
    if shards == 1:
        save_file(tensors, folder / SINGLE_FILE)
        return
    homes = {name: f"part-{number % shards}.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(homes.values()):
        save_file({name: tensors[name] for name, home in homes.items() if home == file}, folder / file)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": homes}))


@pytest.mark.parametrize("shards", [1, 2])
def test_of_a_dense_base_whatever_files_its_weights_are_in(tmp_path: Path, shards: int) -> None:
    write_config(tmp_path, "LlamaForCausalLM", rope_theta=5e5, torch_dtype="float16")
    write_weights(tmp_path, DENSE, shards)
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    assert (
        ModelSpec.from_folder(tmp_path).fingerprint
        == "db255073cd35876b48187fb7e517277b3a0836c412fa9ff2295a0aa92a726b68"
    )


def test_of_a_base_with_experts(tmp_path: Path) -> None:
    write_config(tmp_path, "MixtralForCausalLM", num_local_experts=2, sliding_window=None)
    write_weights(tmp_path, EXPERTS)
    assert (
        ModelSpec.from_folder(tmp_path).fingerprint
        == "a288348ea286fe760ae9c4e921e4add87fdea6b254f81283483f621e2009b210"
    )
