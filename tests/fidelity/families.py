"""One tiny base of every family, and adapters that together touch everything a slot holds."""

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapter_store.base.config import BaseConfig
from tests.fidelity.conftest import Stream
from tests.support.adapters.peft import DENSE, Kind, load_base, make_adapter, make_base
from tests.support.adapters.tiny_models import MULTIPLIERS, PHI4_MINI
from tests.support.adapters.tokenizers import byte_level, write_folder

VOCABULARY = 448
ROPE = {"rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 24}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ROPE}
FAMILIES: Mapping[str, tuple[Kind, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "yarn", **ROPE}}),
    "qwen3": ("qwen3", {"tied": True}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "llama": ("llama", {"rope_parameters": LLAMA3, "shard_size": "100KB"}),
}
# Those that add traits to the decoder, each of which its base has: they run on an engine alone.
NEWER: Mapping[str, tuple[Kind, dict[str, Any]]] = {
    "smollm3": (
        "smollm3",
        {
            "tied": True,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 8,
            "shard_size": "100KB",
        },
    ),
    "granite": ("granite", {"rope_parameters": LLAMA3, **MULTIPLIERS, "logits_scaling": 0.5}),
    # Of two ranks both have the one KV head.
    "olmo2": ("olmo2", {"rope_parameters": {"rope_type": "yarn", **ROPE}, "num_key_value_heads": 1}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
        },
    ),
    "phi3": ("phi3", {"sliding_window": 8, "shard_size": "100KB"}),
    "phi4-mini": ("phi3", {**PHI4_MINI, "tied": True}),
    "glm4": ("glm4", {"num_key_value_heads": 1, "shard_size": "100KB"}),
    "starcoder2": ("starcoder2", {"sliding_window": 8}),
    "cohere": ("cohere", {"logit_scale": 3.0, "shard_size": "100KB"}),
    "cohere2": (
        "cohere2",
        {"tied": True, "logit_scale": 3.0, "sliding_window": 8, "sliding_window_pattern": 2},
    ),
    "gemma2": (
        "gemma2",
        {
            "tied": True,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "gemma3",
        {
            "sliding_window": 8,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 24,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "shard_size": "100KB",
        },
    ),
}
ADAPTERS: Mapping[str, dict[str, Any]] = {
    "all4": {"rank": 4, "targets": DENSE},
    "rank1": {"rank": 1, "alpha": 4, "targets": ["k_proj", "gate_proj"]},
    "rslora16": {"rank": 16, "use_rslora": True, "targets": ["v_proj", "o_proj", "up_proj"], "std": 0.1},
    "patterns": {
        "rank": 2,
        "targets": ["q_proj", "k_proj"],
        "rank_pattern": {"k_proj": 4},
        "alpha_pattern": {"layers.1.self_attn.k_proj": 64},
    },
    "head": {"rank": 4, "targets": ["lm_head"]},
    "embed": {"rank": 8, "targets": ["embed_tokens", "down_proj"]},
    "second-layer": {"rank": 3, "alpha": 6, "targets": DENSE, "layers": [1]},
    "dora": {"rank": 4, "targets": DENSE, "use_dora": True},
    "dora-tables": {"rank": 2, "targets": ["embed_tokens", "lm_head", "v_proj"], "use_dora": True},
}
# For the newer families besides: the highest rank of their slots, and what PEFT means by all-linear.
MORE_ADAPTERS: Mapping[str, dict[str, Any]] = {
    "rank64": {"rank": 64, "targets": ["gate_proj", "down_proj"], "std": 0.05},
    "all-linear": {"rank": 5, "targets": "all-linear"},
}
# Chosen so that no answer comes near a tie.
PROMPT_SEEDS = {
    "qwen2": 1,
    "qwen3": 2,
    "mistral": 2,
    "llama": 9,
    "smollm3": 2,
    "granite": 1,
    "olmo2": 9,
    "olmo3": 4,
    "phi3": 2,
    "starcoder2": 1,
    "cohere": 2,
    "cohere2": 1,
    "glm4": 2,
    "phi4-mini": 7,
    "gemma2": 2,
    "gemma3": 2,
}
# 40 tokens: ten blocks of four, past the windows and past original_max_position_embeddings.
PROMPT_TOKENS = 40


def _renamed(settings: Mapping[str, Any], own: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """An adapter's settings with the modules that a base has in place of others."""
    text = json.dumps(settings)
    for fused, parts in own.items():
        text = re.sub(rf"\b({'|'.join(parts)})\b", fused, text)
    found = dict(json.loads(text))
    if isinstance(found["targets"], list):
        found["targets"] = sorted(set(found["targets"]))
    return found


def make_family(family: str, folder: Path) -> tuple[Path, list[Stream]]:
    """The base's folder, and a prompt for the base and for each adapter."""
    kind, settings = {**FAMILIES, **NEWER}[family]
    adapters = {**ADAPTERS, **MORE_ADAPTERS} if family in NEWER else ADAPTERS
    model = make_base(folder / "model", kind, vocab_size=VOCABULARY, std=0.15, **settings)
    write_folder(model, byte_level())
    own = BaseConfig.from_folder(model).own_projections
    adapters = {name: _renamed(settings, own) for name, settings in adapters.items()}
    base = load_base(model)
    draw = random.Random(PROMPT_SEEDS[family])
    return model, [
        Stream(
            name,
            make_adapter(folder / name, base, seed=5, **adapters[name]) if name in adapters else None,
            tuple(draw.randrange(3, 400) for _ in range(PROMPT_TOKENS)),
        )
        for name in ("base", *adapters)
    ]
