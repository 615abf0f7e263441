"""The served families, and what transformers takes for a field that config.json leaves out.

Only fields that a service reads are here. A test holds every value against transformers' config classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from adapter_store.module_names import FUSED


@dataclass(frozen=True, slots=True)
class ExpertFields:
    """The fields that say how many experts there are, and how wide."""

    count: str
    inner: str
    shared: str | None = None  # of the expert that every token has beside its own
    picked_layers: bool = False  # decoder_sparse_step and mlp_only_layers say which layers have experts


@dataclass(frozen=True, slots=True)
class WindowRope:
    """Layers with a window turn by another base than the others, and are never stretched unless the file's
    rope_parameters say so."""

    theta: float
    theta_field: str | None = None  # of files that transformers 4 wrote


@dataclass(frozen=True, slots=True)
class Family:
    defaults: Mapping[str, Any]
    # Fields that may be null although their default is not: null means something then.
    nullable: frozenset[str] = frozenset({"num_key_value_heads"})
    aliases: Mapping[str, str] = field(default_factory=dict)  # another name -> the field
    rope_theta: float = 10_000.0
    rope: Mapping[str, Any] = field(default_factory=dict)  # where neither rope_scaling nor rope_parameters is
    rope_types: Mapping[str, str] = field(default_factory=dict)  # other names of them, in this family alone
    experts: ExpertFields | None = None
    # Projections of the layers under names of its own, and those that each is in place of.
    own_projections: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    partial_rotation: float | None = None  # the default of partial_rotary_factor; None: heads turn whole
    activation: str = "hidden_act"  # the name of the field
    norm_eps: str = "rms_norm_eps"  # the name of the field
    window_rope: WindowRope | None = None  # None: one rotation for all layers


_SLIDING = frozenset({"num_key_value_heads", "sliding_window"})
_COMMON: Mapping[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_LLAMA: Mapping[str, Any] = {
    **_COMMON,
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
}
_GRANITE: Mapping[str, Any] = {
    **{name: value for name, value in _LLAMA.items() if name != "head_dim"},
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_OLMO2: Mapping[str, Any] = {
    **{name: value for name, value in _LLAMA.items() if name not in ("head_dim", "mlp_bias")},
    "vocab_size": 50_304,
    "rms_norm_eps": 1e-5,
}
_PHI3: Mapping[str, Any] = {
    **_COMMON,
    "vocab_size": 32_064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}
_GLM4: Mapping[str, Any] = {
    **_COMMON,
    "vocab_size": 151_552,
    "hidden_size": 4096,
    "intermediate_size": 13_696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
}
_COHERE: Mapping[str, Any] = {
    "hidden_act": "silu",
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "vocab_size": 256_000,
    "hidden_size": 8192,
    "intermediate_size": 22_528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": None,
    "max_position_embeddings": 8192,
    "attention_bias": False,
    "logit_scale": 0.0625,
}
_STARCODER2: Mapping[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh",
    "norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "vocab_size": 49_152,
    "hidden_size": 3072,
    "intermediate_size": 12_288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "sliding_window": None,
    "use_bias": True,
}
_GEMMA: Mapping[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}
_GEMMA2: Mapping[str, Any] = {
    **_GEMMA,
    "vocab_size": 256_000,
    "max_position_embeddings": 8192,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_GEMMA3: Mapping[str, Any] = {
    **_GEMMA,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "final_logit_softcapping": None,
}
_MISTRAL: Mapping[str, Any] = {
    **_COMMON,
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
_QWEN: Mapping[str, Any] = {
    **_COMMON,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
_QWEN2: Mapping[str, Any] = {
    **_QWEN,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_window_layers": 28,
    "layer_types": None,
}
_QWEN2_MOE: Mapping[str, Any] = {
    **_QWEN,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_window_layers": 28,
    "layer_types": None,
    "qkv_bias": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
_QWEN3_MOE: Mapping[str, Any] = {
    **_QWEN,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "moe_intermediate_size": 768,
}
_SMOLLM3: Mapping[str, Any] = {
    **_COMMON,
    "tie_word_embeddings": True,
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 11_008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "layer_types": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
}
_GPT_OSS: Mapping[str, Any] = {
    **_COMMON,
    "rms_norm_eps": 1e-5,
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "sliding_window": 128,
    "layer_types": None,
    "attention_bias": True,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
_GPT_OSS_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(_LLAMA),
    "MistralForCausalLM": Family(_MISTRAL, _SLIDING),
    "Qwen2ForCausalLM": Family(_QWEN2, _SLIDING),
    "Qwen3ForCausalLM": Family({**_QWEN2, "head_dim": 128, "attention_bias": False}, _SLIDING),
    "SmolLM3ForCausalLM": Family(_SMOLLM3, rope_theta=2e6),
    "GraniteForCausalLM": Family(_GRANITE),
    "Olmo2ForCausalLM": Family(_OLMO2),
    "Olmo3ForCausalLM": Family(
        {**_OLMO2, "sliding_window": 4096, "layer_types": None},
        _SLIDING,
        rope_theta=500_000.0,
        window_rope=WindowRope(500_000.0),
    ),
    "Phi3ForCausalLM": Family(
        _PHI3,
        _SLIDING,
        rope_types={"su": "longrope", "yarn": "longrope"},
        own_projections=FUSED,
        partial_rotation=1.0,
    ),
    "Glm4ForCausalLM": Family(
        _GLM4, own_projections={"gate_up_proj": FUSED["gate_up_proj"]}, partial_rotation=0.5
    ),
    "Starcoder2ForCausalLM": Family(
        _STARCODER2,
        _SLIDING,
        own_projections={"c_fc": ("gate_proj", "up_proj"), "c_proj": ("down_proj",)},
        norm_eps="norm_epsilon",
    ),
    "CohereForCausalLM": Family(_COHERE, rope_theta=500_000.0, norm_eps="layer_norm_eps"),
    "Cohere2ForCausalLM": Family(
        {**_COHERE, "sliding_window": 4096, "layer_types": None}, _SLIDING, norm_eps="layer_norm_eps"
    ),
    "Gemma2ForCausalLM": Family(
        _GEMMA2,
        _SLIDING | {"final_logit_softcapping", "attn_logit_softcapping"},
        activation="hidden_activation",
    ),
    "Gemma3ForCausalLM": Family(
        _GEMMA3,
        _SLIDING,
        rope_theta=1e6,
        activation="hidden_activation",
        window_rope=WindowRope(10_000.0, "rope_local_base_freq"),
    ),
    "MixtralForCausalLM": Family(
        {
            **_MISTRAL,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        aliases={"num_experts": "num_local_experts"},
        rope_theta=1e6,
        experts=ExpertFields("num_local_experts", "intermediate_size"),
    ),
    "Qwen2MoeForCausalLM": Family(
        _QWEN2_MOE,
        _SLIDING,
        experts=ExpertFields(
            "num_experts", "moe_intermediate_size", "shared_expert_intermediate_size", picked_layers=True
        ),
    ),
    "Qwen3MoeForCausalLM": Family(
        _QWEN3_MOE,
        _SLIDING,
        aliases={"num_local_experts": "num_experts"},
        experts=ExpertFields("num_experts", "moe_intermediate_size", picked_layers=True),
    ),
    "GptOssForCausalLM": Family(
        _GPT_OSS,
        _SLIDING,
        aliases={"num_experts": "num_local_experts"},
        rope_theta=150_000.0,
        rope=_GPT_OSS_ROPE,
        experts=ExpertFields("num_local_experts", "intermediate_size"),
    ),
}
