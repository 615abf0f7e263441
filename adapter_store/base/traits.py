"""What the served families are called, what sets them apart, and which is nearest to one that is not."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True, slots=True)
class Described:
    """The names under which a family's models are published, and its traits, as executor/models/README.md
    explains them. A test holds both against what executors read of a config."""

    published: str
    traits: tuple[str, ...] = ()


DESCRIBED: Mapping[str, Described] = {
    "LlamaForCausalLM": Described("Llama 2 and 3, Code Llama, SmolLM2"),
    "MistralForCausalLM": Described("Mistral, Ministral, Mathstral", ("windows",)),
    "Qwen2ForCausalLM": Described("Qwen2, Qwen2.5", ("qkv_bias",)),
    "Qwen3ForCausalLM": Described("Qwen3", ("qk_norm",)),
    "SmolLM3ForCausalLM": Described("SmolLM3", ("tied_head", "unrotated")),
    "GraniteForCausalLM": Described("Granite 3, dense Granite 4", ("multipliers",)),
    "Olmo2ForCausalLM": Described("OLMo 2", ("qk_norm", "norms", "qk_norm_whole")),
    "Olmo3ForCausalLM": Described("OLMo 3", ("windows", "qk_norm", "norms", "qk_norm_whole", "window_rope")),
    "Phi3ForCausalLM": Described("Phi-3, Phi-3.5, Phi-4, Phi-4-mini", ("fused_projections",)),
    "Glm4ForCausalLM": Described(
        "GLM-4, dense", ("qkv_bias", "norms", "fused_projections", "turned_dims", "interleaved")
    ),
    "Starcoder2ForCausalLM": Described(
        "StarCoder2",
        ("qkv_bias", "o_bias", "mlp_bias", "tied_head", "activation", "gated", "norm"),
    ),
    "CohereForCausalLM": Described(
        "Command R, Aya", ("tied_head", "multipliers", "norms", "norm", "interleaved", "parallel")
    ),
    "Cohere2ForCausalLM": Described(
        "Command R7B, Command A",
        ("windows", "unrotated", "tied_head", "multipliers", "norms", "norm", "interleaved", "parallel"),
    ),
    "Gemma2ForCausalLM": Described(
        "Gemma 2", ("windows", "tied_head", "multipliers", "norms", "activation", "norm", "soft_caps")
    ),
    "Gemma3ForCausalLM": Described(
        "Gemma 3, of text alone",
        ("windows", "qk_norm", "tied_head", "multipliers", "norms", "activation", "norm", "window_rope"),
    ),
    "MixtralForCausalLM": Described("Mixtral", ("moe",)),
    "Qwen2MoeForCausalLM": Described("Qwen1.5 and Qwen2 with experts", ("qkv_bias", "moe")),
    "Qwen3MoeForCausalLM": Described("Qwen3 with experts", ("qk_norm", "moe")),
    "GptOssForCausalLM": Described("gpt-oss", ("windows", "qkv_bias", "o_bias", "attention_sinks", "moe")),
}


def nearest(architecture: str) -> str:
    """The served family whose name is most like this one."""
    return get_close_matches(architecture, DESCRIBED, 1, 0.0)[0]
