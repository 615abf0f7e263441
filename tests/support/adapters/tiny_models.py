"""Tiny random models on disk, and the reference logits of transformers for them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.adapters.peft import CONFIGS, Kind

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 24}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.5,
    "logits_scaling": 2.0,
}

GEMMA2 = {
    "head_dim": 32,
    "sliding_window": 8,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 5.0,
}
GEMMA3 = {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32, "sliding_window_pattern": 2}
# Heads of 16, of which 12 dimensions are turned; no sequence is longer than the original length.
PHI4_MINI = {
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 80,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.25, 1.5, 2.0, 3.0, 4.0],
        "long_factor": [64.0] * 6,
    },
}
LINEAR = {"rope_type": "linear", "factor": 2.0}
# What each family is good for: every switch of the decoder is on in at least one of them.
VARIANTS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}},
    ),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "qwen2-yarn-factor": ("qwen2", {"rope_parameters": {**YARN, "attention_factor": 1.5, "truncate": False}}),
    "llama-yarn-mscale": ("llama", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}),
    "mistral-window": ("mistral", {"sliding_window": 8}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-biased-tied": ("qwen3", {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "granite": ("granite", MULTIPLIERS),
    "granite-yarn-biased": ("granite", {**MULTIPLIERS, "rope_parameters": YARN, "attention_bias": True}),
    "olmo2": ("olmo2", {}),
    "olmo2-biased-tied": ("olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    "olmo3": ("olmo3", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    "olmo3-yarn": (
        "olmo3",
        {
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
        },
    ),
    "phi3": ("phi3", {}),
    "phi3-window-tied": ("phi3", {"sliding_window": 8, "tie_word_embeddings": True}),
    "phi4-mini": ("phi3", PHI4_MINI),
    "phi3-partial": ("phi3", {"partial_rotary_factor": 0.5}),
    "glm4": ("glm4", {"head_dim": 16, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    "glm4-unbiased": ("glm4", {"head_dim": 32, "attention_bias": False, "partial_rotary_factor": 1.0}),
    "starcoder2": ("starcoder2", {"use_bias": False}),
    "starcoder2-biased-window": ("starcoder2", {"sliding_window": 8, "tie_word_embeddings": False}),
    "cohere": ("cohere", {"logit_scale": 0.5}),
    "cohere2": ("cohere2", {"sliding_window": 8, "sliding_window_pattern": 2}),
    "cohere2-biased-untied": (
        "cohere2",
        {
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention"],
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma2": ("gemma2", GEMMA2),
    "gemma2-uncapped-biased": (
        "gemma2",
        {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "gemma3": ("gemma3", GEMMA3),
    "gemma3-capped-untied": (
        "gemma3",
        {**GEMMA3, "final_logit_softcapping": 4.0, "tie_word_embeddings": False, "rope_scaling": LINEAR},
    ),
    "smollm3-yarn-window": (
        "smollm3",
        {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 8, "rope_parameters": YARN},
    ),
}


def make_model(family: Kind, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Random float32 weights, norms and biases included, large enough that logits differ clearly."""
    torch.manual_seed(seed)
    config = CONFIGS[family](**{**SIZES, **overrides})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.15)
    return model


def save_variant(name: str, folder: Path, seed: int = 0) -> Path:
    family, overrides = VARIANTS[name]
    make_model(family, seed, **overrides).save_pretrained(folder)
    return folder


@torch.no_grad()
def reference_logits(
    folder: Path, token_ids: Sequence[int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[len(token_ids), vocab] by transformers, eager attention, in one pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    logits: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0]
    return logits
