"""Model folders with the shapes of well-known models, for an executor with `--load-format dummy`.

The checkpoint is a file of the right size that is one big hole: it takes no room, and reads as zeros.
"""

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from lorafleet.bench.errors import BenchError

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    "smollm3-3b": {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000.0,
        "no_rope_layer_interval": 4,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "granite-3.3-8b": {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "hidden_size": 4096,
        "intermediate_size": 12800,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 49159,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000000.0,
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 16.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "phi-4-14b": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_size": 5120,
        "intermediate_size": 17920,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
        "head_dim": 128,
        "vocab_size": 100352,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 250000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 100257,
        "eos_token_id": 100257,
    },
    "gemma-3-12b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 2,
        "eos_token_id": [1, 106],
    },
    "tiny": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "tiny-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}


def write_shapes(name: str, folder: Path, layers: int | None = None) -> None:
    """config.json, model.safetensors, and a tokenizer.json that gives every id a text of its own.

    `layers`: so many in place of the model's. Raises BenchError for a name that is not in SHAPES, and for a
    folder that holds something else: it may be a model. OSError.
    """
    config = SHAPES.get(name)
    if config is None:
        raise BenchError(f"shapes {name!r} are none of {', '.join(SHAPES)}")
    if layers is not None:
        config = {**config, "num_hidden_layers": layers}
    text = json.dumps(config, indent=1) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / "config.json"
    if any(folder.iterdir()) and not (written.is_file() and written.read_text() == text):
        raise BenchError(f"{folder} holds something else already; name a new folder")
    written.write_text(text)
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(config["vocab_size"])))
    _write_hole(folder / "model.safetensors", _tensors(config))


def _tensors(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Names and shapes of a Llama checkpoint, of one with Qwen3's or Mixtral's experts, of Phi or Gemma 3."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query, key = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    layer = {
        "self_attn.q_proj": [query, hidden],
        "self_attn.k_proj": [key, hidden],
        "self_attn.v_proj": [key, hidden],
        "self_attn.o_proj": [hidden, query],
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
    }
    parents, leaves = ["mlp"], ("gate_proj", "up_proj", "down_proj")
    if experts := config.get("num_local_experts"):
        parents = [f"block_sparse_moe.experts.{number}" for number in range(experts)]
        leaves = ("w1", "w3", "w2")
        layer |= {"block_sparse_moe.gate": [experts, hidden]}
    elif experts := config.get("num_experts"):
        inner = config["moe_intermediate_size"]
        parents = [f"mlp.experts.{number}" for number in range(experts)]
        layer |= {"mlp.gate": [experts, hidden]}
        layer |= {f"self_attn.{half}_norm": [config["head_dim"]] for half in "qk"}
    elif config["model_type"] == "gemma3_text":
        layer |= {f"self_attn.{half}_norm": [config["head_dim"]] for half in "qk"}
        layer |= {f"{place}_feedforward_layernorm": [hidden] for place in ("pre", "post")}
    if config["model_type"] == "phi3":
        for part in "qkv":
            del layer[f"self_attn.{part}_proj"]
        layer |= {"self_attn.qkv_proj": [query + 2 * key, hidden], "mlp.gate_up_proj": [2 * inner, hidden]}
        layer["mlp.down_proj"] = [hidden, inner]
        parents = []
    for parent in parents:
        layer |= {f"{parent}.{leaf}": [inner, hidden] for leaf in leaves[:2]}
        layer[f"{parent}.{leaves[2]}"] = [hidden, inner]
    tensors = {
        f"model.layers.{number}.{name}.weight": shape
        for number in range(config["num_hidden_layers"])
        for name, shape in layer.items()
    }
    table = [vocab, hidden]
    ends = {"model.embed_tokens.weight": table, "model.norm.weight": [hidden], "lm_head.weight": table}
    return tensors | ends


def _write_hole(file: Path, tensors: Mapping[str, list[int]]) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, shape in tensors.items():
        start, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as writer:
        writer.write(struct.pack("<Q", len(text)) + text)
        writer.truncate(8 + len(text) + end)


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    """Whole words: the scheduler needs one to turn ids into text, as it does with a real model."""
    vocabulary = {f"t{token_id} ": token_id for token_id in range(vocab_size)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0 "},
    }
