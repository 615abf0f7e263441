import json
from pathlib import Path
from typing import Any

import pytest

from adapter_store import InvalidModel
from executor.errors import BadCheckpoint, ExecutorError, UnsupportedModel
from executor.layers.model_config import ModelConfig, Multipliers, Rope, SoftCaps
from executor.layers.rotary import LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling
from executor.models import read_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


def read(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    """A change to ... leaves the field out."""
    config = {name: value for name, value in {**BASE, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_config(folder)


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    config = read(tmp_path, hidden_act=..., num_key_value_heads=...)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps, config.rope_theta) == (
        4,
        16,
        1e-6,
        1e4,
    )
    assert (config.windows, config.tied_head, config.rope_scaling) == ((None,) * 3, False, None)
    assert config.eos_token_ids == ()


def test_how_a_model_was_trained_does_not_matter(tmp_path: Path) -> None:
    """Llama 2 13B was published with pretraining_tp = 2: the same matrices, multiplied in two pieces."""
    assert read(tmp_path, pretraining_tp=2) == read(tmp_path)


def test_biases_and_norms_by_family(tmp_path: Path) -> None:
    def switches(**changes: Any) -> tuple[bool, ...]:
        config = read(tmp_path, **changes)
        return config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm

    assert switches() == (False, False, False, False)
    assert switches(architectures=["Olmo2ForCausalLM"], attention_bias=True) == (True, True, False, True)
    assert switches(attention_bias=True, mlp_bias=True) == (True, True, True, False)
    assert switches(architectures=["MistralForCausalLM"]) == (False, False, False, False)
    assert switches(architectures=["Qwen2ForCausalLM"]) == (True, False, False, False)
    assert read(tmp_path, architectures=["Qwen3ForCausalLM"]).head_dim == 128
    assert switches(architectures=["Qwen3ForCausalLM"], head_dim=32) == (False, False, False, True)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, (8, 8, 8)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None, None, None)),
        ({"architectures": ["MistralForCausalLM"]}, (4096, 4096, 4096)),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8}, (None, None, None)),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 2,
            },
            (None, None, 8),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
        ({"architectures": ["Gemma2ForCausalLM"], "sliding_window": 8}, (8, None, 8)),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window": 8}, (8, 8, 8)),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 3}, (4096, 4096, None)),
    ],
)
def test_windows(tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read(tmp_path, **changes).windows == windows


@pytest.mark.parametrize(
    ("changes", "unrotated"),
    [
        ({"num_hidden_layers": 8}, {3, 7}),
        ({"no_rope_layer_interval": 2}, {1}),
        ({"no_rope_layers": [0, 1, 0, 0]}, {0, 2}),  # more than layers, as in a model that was cut
        ({"no_rope_layers": [1, 1, 1], "no_rope_layer_interval": 2}, set()),
    ],
)
def test_layers_without_rotation(tmp_path: Path, changes: dict[str, Any], unrotated: set[int]) -> None:
    assert read(tmp_path, architectures=["SmolLM3ForCausalLM"], **changes).unrotated == unrotated


def test_multipliers_are_read_by_the_family_that_has_them(tmp_path: Path) -> None:
    granite = {"architectures": ["GraniteForCausalLM"], "rms_norm_eps": 1e-5}
    written = {"embedding_multiplier": 12, "attention_multiplier": 0.0078125, "residual_multiplier": 0.5}
    config = read(tmp_path, **granite, **written, logits_scaling=16)
    assert config.multipliers == Multipliers(12, 0.5, 0.0078125, 1 / 16)
    assert (config.residual_eps, config.rms_norm_eps) == (4e-5, 1e-5)
    assert read(tmp_path, **granite).multipliers == Multipliers(scores=1.0)  # as transformers' default says
    assert read(tmp_path, embedding_multiplier=1).multipliers == Multipliers()
    with pytest.raises(UnsupportedModel, match="embedding_multiplier"):
        read(tmp_path, embedding_multiplier=12)
    for name in (*written, "logits_scaling"):
        with pytest.raises(UnsupportedModel, match=f"{name} = 0 .* above 0"):
            read(tmp_path, **granite, **{name: 0})


def test_gemma_scales_by_its_own_numbers(tmp_path: Path) -> None:
    gemma2 = read(tmp_path, architectures=["Gemma2ForCausalLM"], hidden_act=..., query_pre_attn_scalar=144)
    assert gemma2.multipliers == Multipliers(8.0, scores=1 / 12, embedding_rounded=True)
    assert (gemma2.soft_caps, gemma2.activation, gemma2.norm) == (SoftCaps(50, 30), "gelu_tanh", "offset_rms")
    assert (gemma2.head_dim, gemma2.tied_head, gemma2.window_rope) == (256, True, None)
    rope = {"rope_scaling": {"rope_type": "linear", "factor": 8}, "rope_local_base_freq": 500.0}
    gemma3 = read(tmp_path, architectures=["Gemma3ForCausalLM"], **rope)
    assert (gemma3.rope_theta, gemma3.rope_scaling) == (1e6, LinearScaling(8.0))
    assert (gemma3.window_rope, gemma3.multipliers.scores) == (Rope(500.0), None)
    assert gemma3.soft_caps == SoftCaps()


@pytest.mark.parametrize("marks", [[1, 0], 4, [1, 1, "0"]])
def test_wrong_marks_of_rotation_are_named(tmp_path: Path, marks: Any) -> None:
    with pytest.raises(InvalidModel, match="no_rope_layers must be 0"):
        read(tmp_path, architectures=["SmolLM3ForCausalLM"], no_rope_layers=marks)


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_rope_in_both_spellings(tmp_path: Path, spelling: str, kind: str) -> None:
    config = read(tmp_path, rope_theta=5e5, **{spelling: {kind: "llama3", **LLAMA3}})
    assert config.rope_theta == 5e5
    assert config.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 512)
    config = read(tmp_path, rope_theta=5e5, **{spelling: {kind: "linear", "factor": 2, "rope_theta": 7.0}})
    assert (config.rope_theta, config.rope_scaling) == (7.0, LinearScaling(2.0))


def test_yarn_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, rope_parameters={"rope_type": "yarn", "factor": 4.0})
    expected = YarnScaling(4.0, 4096, pytest.approx(1.1386294), 32.0, 1.0, True)
    assert config.rope_scaling == expected


def test_longrope_serves_the_original_length(tmp_path: Path) -> None:
    """With one factor a plane, whatever the family calls it."""
    factors = [1.0, 1.5, 2.0, 2.5, 3.0, 4.0]
    phi = {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.75, "head_dim": 16}
    written = {**phi, "max_position_embeddings": 8192, "original_max_position_embeddings": 512}
    scaling = {"short_factor": factors, "long_factor": [9.0] * 6}
    grown = pytest.approx((1 + 4 / 9) ** 0.5)  # 16 = 2^4 times 512 = 2^9
    for kind in ("longrope", "su", "yarn"):
        config = read(tmp_path, **written, rope_scaling={"type": kind, **scaling})
        assert config.rope_scaling == LongRopeScaling(tuple(factors), grown)
        assert (config.turned_dims, config.max_position_embeddings) == (12, 512)
    for wrong in (factors[:-1], "1"):
        with pytest.raises(InvalidModel, match="short_factor must be a list of 6 numbers"):
            read(tmp_path, **written, rope_scaling={"type": "longrope", "short_factor": wrong})


def test_end_tokens(tmp_path: Path) -> None:
    assert read(tmp_path, eos_token_id=2).eos_token_ids == (2,)
    assert read(tmp_path, generation={"eos_token_id": [5, 6]}, eos_token_id=2).eos_token_ids == (5, 6)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "linear", "factor": 2}}, "longrope"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "bidirectional"),
        ({"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"architectures": ["Gemma2ForCausalLM"], "sliding_window": None}, "sliding_window"),
        ({"architectures": ["Gemma2ForCausalLM"], "final_logit_softcapping": 0}, "final_logit_softcapping"),
        ({"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "relu"}, "hidden_activation"),
        ({"architectures": ["MixtralForCausalLM"], "hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.19}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"head_dim": 15}, "head_dim"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]}, "layer_types"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["linear_attention"] * 3}, "layer_types"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 3}, "layer_types"),
    ],
    ids=str,
)  # fmt: skip
def test_other_maths_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedModel, match=field):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be token ids"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope_scaling: low_freq_factor is missing",
        ),
    ],
    ids=str,
)
def test_malformed_fields_are_named(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidModel, match=field):
        read(tmp_path, **changes)


def test_both_kinds_are_executor_errors() -> None:
    assert issubclass(UnsupportedModel, ExecutorError)
    assert issubclass(BadCheckpoint, ExecutorError)
