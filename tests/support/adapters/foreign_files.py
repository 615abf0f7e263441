"""A PEFT adapter written as mlx-lm and mistral-finetune would have written it."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.adapters.peft import read_tensors

_PREFIX = "base_model.model."
_MISTRAL_NAMES = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "block_sparse_moe.experts": "feed_forward.experts",
}


def write_mlx(folder: Path, tensors: dict[str, Tensor], rank: int, scale: float, **config: Any) -> Path:
    folder.mkdir()
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "adapters.safetensors")
    fields = {
        "model": "mlx-community/d0-4bit",
        "fine_tune_type": "lora",
        "num_layers": 2,
        "lora_parameters": {"rank": rank, "dropout": 0.0, "scale": scale},
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    return folder


def as_mlx(folder: Path, adapter: Path, **config: Any) -> Path:
    """x @ lora_a @ lora_b * scale, where PEFT has B (A x) * alpha / r."""
    tensors = {}
    for name, tensor in read_tensors(adapter).items():
        name = name.removeprefix(_PREFIX)
        if name.endswith(".lora_magnitude_vector"):
            tensors[name.removesuffix(".lora_magnitude_vector") + ".m"] = tensor
        else:
            tensors[name.removesuffix(".weight").lower()] = tensor.T
    peft = json.loads((adapter / "adapter_config.json").read_text())
    return write_mlx(folder, tensors, peft["r"], peft["lora_alpha"] / peft["r"], **config)


def as_mistral(folder: Path, adapter: Path, heads: int, kv_heads: int, head_dim: int, **params: Any) -> Path:
    tensors = {}
    for name, tensor in read_tensors(adapter).items():
        name = name.removeprefix(_PREFIX + "model.")
        if name.endswith(("q_proj.lora_B.weight", "k_proj.lora_B.weight")):
            tensor = in_mistrals_order(tensor, head_dim)
        for theirs, mistrals in _MISTRAL_NAMES.items():
            name = name.replace(theirs, mistrals)
        tensors[name] = tensor.contiguous()
    folder.mkdir()
    save_file(tensors, folder / "lora.safetensors")
    peft = json.loads((adapter / "adapter_config.json").read_text())
    lora = {"enable": True, "rank": peft["r"], "dropout": 0.0, "scaling": peft["lora_alpha"] / peft["r"]}
    fields = {"n_heads": heads, "n_kv_heads": kv_heads, "head_dim": head_dim, "lora": lora}
    (folder / "params.json").write_text(json.dumps(fields | params))
    return folder


def in_mistrals_order(rows: Tensor, head_dim: int) -> Tensor:
    """transformers turns rows i and i + head_dim / 2 of a head together, Mistral rows 2i and 2i + 1."""
    half, order = head_dim // 2, []
    for head in range(0, len(rows), head_dim):
        for i in range(half):
            order += [head + i, head + half + i]
    return rows[torch.tensor(order)]
