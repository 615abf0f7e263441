"""A pushed weights file comes back byte for byte from what is packed and its recipe."""

import io
from pathlib import Path

import pytest
import torch

from adapter_store import DataLoss, ModelSpec, Weights
from adapter_store.packed.packer import Packing
from adapter_store.packed.recipe import rebuild, recipe_pieces
from adapter_store.peft.folder import read_adapter
from tests.support.adapters.peft import load_base, raw_adapter, read_tensors


def recipe_of(folder: Path, spec: ModelSpec, packed: Path) -> tuple[bytes, Weights]:
    adapter = read_adapter(folder, spec)
    with packed.open("wb") as target:
        manifest = Packing(adapter).write(target)
    return b"".join(recipe_pieces(adapter)), Weights.open(packed, manifest)


def rebuilt(recipe: bytes, weights: Weights) -> bytes:
    target = io.BytesIO()
    rebuild(memoryview(recipe), weights, target)
    return target.getvalue()


@pytest.mark.parametrize("name", ["dense_adapter", "full_adapter"])
def test_what_peft_wrote(name: str, request: pytest.FixtureRequest, spec: ModelSpec, tmp_path: Path) -> None:
    folder: Path = request.getfixturevalue(name)
    recipe, weights = recipe_of(folder, spec, tmp_path / "packed")
    pushed = (folder / "adapter_model.safetensors").read_bytes()
    assert rebuilt(recipe, weights) == pushed
    left_out = sum(t.nbytes for name, t in read_tensors(folder).items() if "base_layer" in name)
    header_bytes = 8 + int.from_bytes(pushed[:8], "little")
    assert left_out + header_bytes < len(recipe) < left_out + 3 * header_bytes


@pytest.mark.parametrize("order", [1, -1])
def test_mixed_dtypes_and_copies_of_the_base(
    d0: Path, full_adapter: Path, spec: ModelSpec, tmp_path: Path, order: int
) -> None:
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    tensors = {
        name: tensor.to(dtypes[i % 3]) for i, (name, tensor) in enumerate(read_tensors(full_adapter).items())
    }
    tensors["base_model.model.model.embed_tokens.base_layer.weight"] = (
        load_base(d0).get_input_embeddings().weight.detach()
    )
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    folder = raw_adapter(
        tmp_path / "a",
        dict(list(tensors.items())[::order]),
        target_modules=[*targets, "embed_tokens", "lm_head"],
    )
    recipe, weights = recipe_of(folder, spec, tmp_path / "packed")
    assert rebuilt(recipe, weights) == (folder / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize("position", [0, 9, 60, -1])
def test_a_damaged_recipe_is_data_loss(
    dense_adapter: Path, spec: ModelSpec, tmp_path: Path, position: int
) -> None:
    recipe, weights = recipe_of(dense_adapter, spec, tmp_path / "packed")
    damaged = bytearray(recipe)
    damaged[position] ^= 1
    with pytest.raises(DataLoss):
        rebuild(memoryview(damaged), weights)
    with pytest.raises(DataLoss):
        rebuild(memoryview(b""), weights)
    rebuild(memoryview(recipe), weights)
