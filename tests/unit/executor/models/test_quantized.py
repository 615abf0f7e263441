"""Quantized checkpoints load as exactly what their formulas say."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from executor.distributed import SINGLE, ParallelGroup
from executor.errors import BadCheckpoint, UnsupportedModel
from executor.models import load_model
from tests.support.adapters.moe_models import make_moe_base
from tests.support.adapters.tiny_models import save_variant

Tensors = dict[str, Tensor]
FILE = "model.safetensors"
BLOCK = (32, 48)  # divides some of the sizes, and not others
HF_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": strategy, **weights},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def per_tensor(weight: Tensor) -> Tensor:
    return (weight.abs().max() / 448).reshape(1)


def per_row(weight: Tensor) -> Tensor:
    return weight.abs().amax(1, keepdim=True) / 448


def per_block(weight: Tensor) -> Tensor:
    rows, columns = weight.split(BLOCK[0]), BLOCK[1]
    return torch.stack([torch.stack([b.abs().max() for b in row.split(columns, 1)]) for row in rows]) / 448


def spread(scales: Tensor, weight: Tensor) -> Tensor:
    """The scale of each element, by the formula: the block that it is in."""
    if (scales.dim() == 2 and scales.shape[1] > 1) or scales.shape[0] not in (1, len(weight)):
        n, k = torch.arange(weight.shape[0]) // BLOCK[0], torch.arange(weight.shape[1]) // BLOCK[1]
        return scales[n][:, k]
    return scales


FORMS: dict[str, tuple[dict[str, Any], str, Callable[[Tensor], Tensor]]] = {
    "fp8": (HF_FP8, "weight_scale_inv", per_tensor),
    "fp8-blocks": ({**HF_FP8, "weight_block_size": list(BLOCK)}, "weight_scale_inv", per_block),
    "ct-tensor": (compressed("tensor"), "weight_scale", per_tensor),
    "ct-channel": (compressed("channel"), "weight_scale", per_row),
    "ct-block": (compressed("block", block_structure=list(BLOCK)), "weight_scale", per_block),
}


def quantize(folder: Path, form: str, dtype: torch.dtype = torch.float8_e4m3fn) -> None:
    """Turns the projections of a plain folder into FP8, and leaves what they mean in `plain`, beside it."""
    config, scale_name, scaling = FORMS[form]
    tensors = load_file(folder / FILE)
    plain = dict(tensors)
    for name, weight in list(tensors.items()):
        if not re.search(r"(_proj|\.w[123])\.weight$", name):
            continue
        scales = scaling(weight)
        values = (weight / spread(scales, weight)).to(dtype)
        tensors[name] = values
        tensors[name.removesuffix("weight") + scale_name] = scales
        tensors[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
        plain[name] = values.float() * spread(scales, weight)
    write(folder, tensors, quantization_config=config)
    write(folder.with_name("plain"), plain, folder / "config.json")


def write(folder: Path, tensors: Tensors, config: Path | None = None, **fields: Any) -> None:
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE)
    values = json.loads((config or folder / "config.json").read_text())
    values.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(values | fields))


def parameters(folder: Path, group: ParallelGroup = SINGLE) -> Tensors:
    return dict(load_model(folder, torch.float32, "cpu", group).named_parameters())


def assert_same(got: Tensors, wanted: Tensors) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("base", ["llama", "mixtral", "qwen3-moe"])
def test_fp8_is_what_its_formula_says(base: str, form: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_variant(base, folder) if base == "llama" else make_moe_base(folder, base)
    quantize(folder, form)
    assert_same(parameters(folder), parameters(tmp_path / "plain"))
    for rank in range(2):
        group = ParallelGroup(rank, 2)
        assert_same(parameters(folder, group), parameters(tmp_path / "plain", group))


def test_e5m2_too(tmp_path: Path) -> None:
    folder = save_variant("llama", tmp_path / "model")
    quantize(folder, "fp8", torch.float8_e5m2)
    assert_same(parameters(folder), parameters(tmp_path / "plain"))


def test_mxfp4_is_what_transformers_says(tmp_path: Path) -> None:
    folder = make_moe_base(tmp_path / "model", "gpt-oss", intermediate_size=32)
    tensors = load_file(folder / FILE)
    plain = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, wide, high = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, high, wide // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 128, (experts, high, wide // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert plain[name].shape == (experts, wide, high)
    write(folder, tensors, quantization_config={"quant_method": "mxfp4"})
    write(tmp_path / "plain", plain, folder / "config.json")
    assert_same(parameters(folder), parameters(tmp_path / "plain"))
    for group in (ParallelGroup(0, 2), ParallelGroup(1, 2)):
        assert_same(parameters(folder, group), parameters(tmp_path / "plain", group))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.update({Q: t[Q].float()}), r"q_proj\.weight is torch\.float32 .* not a matrix of FP8"),
        (lambda t: t.update({SCALE: torch.ones(3, 1)}), r"q_proj\.weight has scales \[3, 1\] for \[64, 64\]"),
        (lambda t: t.pop(SCALE), r"q_proj\.weight is torch\.float8_e4m3fn: no quantization"),
        (lambda t: t.pop(Q), "1 tensors are missing"),
    ],
)
def test_a_damaged_checkpoint_names_the_tensor(
    change: Callable[[Tensors], object], text: str, tmp_path: Path
) -> None:
    folder = save_variant("llama", tmp_path / "model")
    quantize(folder, "ct-channel")
    tensors = load_file(folder / FILE)
    change(tensors)
    write(folder, tensors, quantization_config=FORMS["ct-channel"][0])
    with pytest.raises(BadCheckpoint, match=text):
        parameters(folder)


Q = "model.layers.0.self_attn.q_proj.weight"
SCALE = f"{Q}_scale"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"quant_method": "awq"}, "quant_method"),
        ({**HF_FP8, "weight_block_size": 128}, "weight_block_size"),
        ({**compressed("tensor"), "format": "pack-quantized"}, "format"),
        ({**compressed("tensor"), "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({**compressed("tensor"), "config_groups": {}}, "config_groups"),
        (compressed("group"), "strategy"),
        (compressed("tensor", num_bits=4), "num_bits"),
        (compressed("tensor", type="int"), "type"),
        (compressed("tensor", symmetric=False), "symmetric"),
    ],
)
def test_other_quantizations_are_refused_by_name(config: dict[str, Any], text: str, tmp_path: Path) -> None:
    folder = save_variant("llama", tmp_path)
    write(folder, load_file(folder / FILE), quantization_config=config)
    with pytest.raises(UnsupportedModel, match=f"{text} = .* is not supported"):
        parameters(folder)
