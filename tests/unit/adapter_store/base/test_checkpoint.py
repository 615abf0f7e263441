"""Which files are the checkpoint: the same for pushes, for the executor, and for transformers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from adapter_store import InvalidModel, ModelSpec
from adapter_store.base.checkpoint import INDEX_FILE, SINGLE_FILE, has_checkpoint, read_tensors
from executor.models import load_model
from tests.support.adapters.peft import make_base

HEAD = "lm_head.weight"


@pytest.fixture
def base(tmp_path: Path, d0: Path) -> Path:
    """A copy of D0, which has one file, to damage."""
    return shutil.copytree(d0, tmp_path / "base")


def add_index(base: Path, shard: str | None) -> None:
    """As it stays behind when a sharded checkpoint was merged: its shard is gone, or has other weights."""
    tensors = load_file(base / SINGLE_FILE)
    if shard is not None:
        save_file({name: tensor.bfloat16() + 1 for name, tensor in tensors.items()}, base / shard)
    weight_map = dict.fromkeys(tensors, shard or "model-00001-of-00001.safetensors")
    (base / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("shard", [None, "old-00001-of-00001.safetensors"])
def test_a_single_file_wins_over_an_index_that_was_left_over(base: Path, shard: str | None) -> None:
    before = ModelSpec.from_folder(base)
    add_index(base, shard)
    spec = ModelSpec.from_folder(base)
    theirs = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    ours = dict(load_model(base, torch.float32, "cpu").named_parameters())
    assert spec.fingerprint == before.fingerprint
    assert spec.open_base_tensor("lm_head")[0].raw(HEAD) == before.open_base_tensor("lm_head")[0].raw(HEAD)
    assert read_tensors(base)[HEAD].file == base / SINGLE_FILE
    assert torch.equal(ours[HEAD], theirs.get_output_embeddings().weight)


def test_shards_are_read_as_one_checkpoint(tmp_path: Path) -> None:
    folder = make_base(tmp_path / "sharded", shard_size="50KB")
    whole = make_base(tmp_path / "whole")
    sharded, single = read_tensors(folder), read_tensors(whole)
    assert {t.file.name for t in single.values()} == {SINGLE_FILE} and len(
        {t.file for t in sharded.values()}
    ) > 2
    assert {n: (t.dtype, t.shape) for n, t in sharded.items()} == {
        n: (t.dtype, t.shape) for n, t in single.items()
    }
    assert has_checkpoint(folder) and has_checkpoint(whole) and not has_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("index", "complaint"),
    [
        ('{"weight_map": {"a": "../x.safetensors"}}', "a points at '../x.safetensors'"),
        ('{"weight_map": {"a": 1}}', "a points at 1"),
        ('{"weight_map": {"a": "gone.safetensors"}}', r"cannot read .*gone\.safetensors"),
        ("{}", "weight_map"),
        ("[]", INDEX_FILE),
        ("{", INDEX_FILE),
        ('{"weight_map": []}', "weight_map"),
    ],
)
def test_a_damaged_index_is_refused(base: Path, index: str, complaint: str) -> None:
    (base / SINGLE_FILE).unlink()
    (base / INDEX_FILE).write_text(index)
    with pytest.raises(InvalidModel, match=complaint):
        ModelSpec.from_folder(base)


def test_a_tensor_in_a_shard_that_the_index_does_not_name_is_refused(base: Path) -> None:
    add_index(base, "model-00001-of-00001.safetensors")
    (base / SINGLE_FILE).rename(base / "model-00002-of-00002.safetensors")
    weight_map = json.loads((base / INDEX_FILE).read_text())["weight_map"]
    weight_map[HEAD] = "model-00002-of-00002.safetensors"
    (base / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InvalidModel, match="disagree about"):
        read_tensors(base)
