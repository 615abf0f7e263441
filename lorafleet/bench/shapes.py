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

_ALL = {"hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "mlp_bias": False
}  # fmt: skip
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True,
    "attention_bias": False,
}  # fmt: skip
_COLUMNS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "bos_token_id",
    "eos_token_id",
)  # fmt: skip
# The columns, then what else the model's config says.
_ROWS: Mapping[str, tuple[tuple[float, ...], Mapping[str, Any]]] = {
    "llama-3.1-8b": (
        (4096, 14336, 32, 32, 8, 128, 128256, 8192, 1e-5, 500000.0, 128000, 128001),
        _LLAMA,
    ),
    "mixtral-8x7b": (
        (4096, 14336, 32, 32, 8, 128, 32000, 32768, 1e-5, 1000000.0, 1, 2),
        {
            "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None,
            "num_local_experts": 8, "num_experts_per_tok": 2,
        },
    ),
    "qwen3-30b-a3b": (
        (2048, 6144, 48, 32, 4, 128, 151936, 40960, 1e-6, 1000000.0, 151643, 151645),
        {**_QWEN3_MOE, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
    ),
    "smollm3-3b": (
        (2048, 11008, 36, 16, 4, 128, 128256, 65536, 1e-6, 5000000.0, 128000, 128001),
        {
            "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
    ),
    "granite-3.3-8b": (
        (4096, 12800, 40, 32, 8, 128, 49159, 131072, 1e-5, 10000000.0, 0, 0),
        {
            "architectures": ["GraniteForCausalLM"], "model_type": "granite", "tie_word_embeddings": True,
            "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
            "logits_scaling": 16.0,
        },
    ),
    "phi-4-14b": (
        (5120, 17920, 40, 40, 10, 128, 100352, 16384, 1e-5, 250000.0, 100257, 100257),
        {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"},
    ),
    "gemma-3-12b": (
        (3840, 15360, 48, 16, 8, 256, 262208, 131072, 1e-6, 1000000.0, 2, 1),
        {
            "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "tie_word_embeddings": True,
            "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
            "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "query_pre_attn_scalar": 256, "sliding_window": 1024, "sliding_window_pattern": 6,
            "eos_token_id": [1, 106],
        },
    ),
    "tiny": (
        (64, 96, 2, 4, 2, 16, 512, 4096, 1e-5, 10000.0, 1, 2),
        {**_LLAMA, "torch_dtype": "float32"},
    ),
    "tiny-moe": (
        (64, 96, 2, 4, 2, 16, 512, 4096, 1e-6, 10000.0, 1, 2),
        {
            **_QWEN3_MOE, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
            "torch_dtype": "float32",
        },
    ),
}  # fmt: skip
SHAPES: Mapping[str, Mapping[str, Any]] = {
    name: {**_ALL, **dict(zip(_COLUMNS, columns, strict=True)), **more}
    for name, (columns, more) in _ROWS.items()
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
