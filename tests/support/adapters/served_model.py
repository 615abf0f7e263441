"""A base model folder, and PEFT folders that fit it, written with numpy alone."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.support.adapters.tokenizers import CHAT_TEMPLATE, byte_level, write_folder

HIDDEN, LAYERS, MAX_MODEL_LEN = 16, 1, 512


def write_model(path: Path) -> Path:
    """A Llama of one layer with the byte-level tokenizer of tests/support/adapters/tokenizers.py."""
    tokenizer = byte_level()
    write_folder(path, tokenizer, chat_template=CHAT_TEMPLATE)
    vocab = tokenizer.get_vocab_size(with_added_tokens=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": MAX_MODEL_LEN,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
    }
    (path / "config.json").write_text(json.dumps(config))
    shapes = {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (32, HIDDEN), "mlp.up_proj": (32, HIDDEN), "mlp.down_proj": (HIDDEN, 32)}
    tensors = {f"model.layers.0.{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"model.layers.0.{name}.weight"] = np.ones(HIDDEN, np.float32)
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    tensors["model.embed_tokens.weight"] = np.zeros((vocab, HIDDEN), np.float32)
    tensors["lm_head.weight"] = np.zeros((vocab, HIDDEN), np.float32)
    save_file(tensors, path / "model.safetensors")
    return path


def write_adapter(path: Path, *, rank: int = 4, seed: int = 0, module: str = "q_proj") -> Path:
    """LoRA on one attention projection."""
    path.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [module],
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    noise = np.random.default_rng(seed)
    prefix = f"base_model.model.model.layers.0.self_attn.{module}"
    tensors = {
        f"{prefix}.lora_A.weight": noise.standard_normal((rank, HIDDEN)).astype(np.float32),
        f"{prefix}.lora_B.weight": noise.standard_normal((HIDDEN, rank)).astype(np.float32),
    }
    save_file(tensors, path / "adapter_model.safetensors")
    return path
