"""Configs as transformers' classes write them mean to both services what they mean to the classes."""

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    Cohere2Config,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from adapter_store import InvalidModel, ModelSpec
from adapter_store.base.config import BaseConfig
from adapter_store.base.end_tokens import read_end_tokens
from adapter_store.base.families import FAMILIES
from executor.errors import UnsupportedModel
from executor.models import read_config

CLASSES: Mapping[str, type[PreTrainedConfig]] = {
    "LlamaForCausalLM": LlamaConfig,
    "MistralForCausalLM": MistralConfig,
    "Qwen2ForCausalLM": Qwen2Config,
    "Qwen3ForCausalLM": Qwen3Config,
    "SmolLM3ForCausalLM": SmolLM3Config,
    "GraniteForCausalLM": GraniteConfig,
    "Olmo2ForCausalLM": Olmo2Config,
    "Olmo3ForCausalLM": Olmo3Config,
    "Phi3ForCausalLM": Phi3Config,
    "Starcoder2ForCausalLM": Starcoder2Config,
    "CohereForCausalLM": CohereConfig,
    "Cohere2ForCausalLM": Cohere2Config,
    "Glm4ForCausalLM": Glm4Config,
    "Gemma2ForCausalLM": Gemma2Config,
    "Gemma3ForCausalLM": Gemma3TextConfig,
    "MixtralForCausalLM": MixtralConfig,
    "Qwen2MoeForCausalLM": Qwen2MoeConfig,
    "Qwen3MoeForCausalLM": Qwen3MoeConfig,
    "GptOssForCausalLM": GptOssConfig,
}
# Other than every default, and such that each still fits the defaults of the others.
SIZES: Mapping[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 512,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 640,
    "rms_norm_eps": 1e-4,
    "layer_norm_eps": 1e-3,
    "norm_epsilon": 1e-3,
    "logit_scale": 0.5,
    "tie_word_embeddings": True,
    "sliding_window": 8,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "attention_bias": True,
    "mlp_bias": True,
    "qkv_bias": False,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [1],
    "no_rope_layer_interval": 3,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.125,
    "logits_scaling": 8.0,
    "hidden_activation": "silu",
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 40.0,
    "final_logit_softcapping": 20.0,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0},
}
BY_LAYER = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 66.0},
}
# Where a class refuses values of SIZES.
OTHER_SIZES: Mapping[str, Mapping[str, Any]] = {
    "Phi3ForCausalLM": {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    "Olmo3ForCausalLM": {"rope_parameters": BY_LAYER},
    "Gemma3ForCausalLM": {
        "attn_logit_softcapping": None,  # which the class has, and the model never reads
        "rope_parameters": BY_LAYER,
    },
}
FAILS_LATER = ("layer_norm_eps", "logit_scale")  # where Cohere's class takes null, and the model does not
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: list[dict[str, Any]] = [
    {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 128}},
    {"rope_scaling": LLAMA3, "original_max_position_embeddings": 64},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 9.0}, "rope_theta": 3.0},
    {"rope_parameters": {}, "rope_scaling": None},
    {"rope_theta": 7},
    {},
]


def written_by(architecture: str) -> dict[str, Any]:
    """config.json as the class writes it, with a value of its own in every field that a service reads."""
    names = {field.name for field in fields(CLASSES[architecture])}
    sizes = deepcopy({**SIZES, **OTHER_SIZES.get(architecture, {})})  # classes change what is inside
    config = CLASSES[architecture](**{n: v for n, v in sizes.items() if n in names or n == "head_dim"})
    config.architectures = [architecture]
    return dict(json.loads(config.to_json_string()))


def as_the_class_has_it(architecture: str, written: Mapping[str, Any]) -> dict[str, Any]:
    config = CLASSES[architecture].from_dict(deepcopy(dict(written)))
    config.standardize_rope_params()  # as the model class does

    def of(*names: str) -> Any:
        return next((value for name in names if (value := getattr(config, name, None)) is not None), None)

    sliding = config.sliding_window or None if hasattr(config, "sliding_window") else None
    types = of("layer_types") or ["sliding_attention"] * config.num_hidden_layers
    head_dim = of("head_dim") or config.hidden_size // config.num_attention_heads
    # Lists of transformers' model classes: where experts are, and that q has heads * head_dim rows.
    step, dense = of("decoder_sparse_step") or 1, of("mlp_only_layers") or []
    sparse = [layer not in dense and (layer + 1) % step == 0 for layer in range(config.num_hidden_layers)]
    experts = FAMILIES[architecture].experts is not None
    return {
        "sizes": (config.vocab_size, config.hidden_size, config.num_hidden_layers),
        "inner": config.intermediate_size,
        "heads": (config.num_attention_heads, config.num_key_value_heads, head_dim),
        "length": served_length(config),
        "tied": config.tie_word_embeddings,
        "rope": ropes_of(config),
        "eps": of("rms_norm_eps", "layer_norm_eps", "norm_epsilon"),
        "logit scale": of("logit_scale"),
        "windows": tuple(sliding if kind == "sliding_attention" else None for kind in types),
        "multipliers": tuple(getattr(config, name, None) for name in MULTIPLIERS),
        "caps": (of("attn_logit_softcapping"), of("final_logit_softcapping")),
        "unrotated": unrotated(config),
        "experts": of("num_experts", "num_local_experts") if experts else None,
        "expert layers": tuple(sparse) if experts else None,
        "top_k": of("num_experts_per_tok"),
        "expert widths": (
            of("moe_intermediate_size", "intermediate_size"),
            of("shared_expert_intermediate_size"),
        )
        if experts
        else None,
    }


def served_length(config: PreTrainedConfig) -> int:
    rope = config.rope_parameters
    longrope = rope.get("rope_type") == "longrope"
    return rope["original_max_position_embeddings"] if longrope else config.max_position_embeddings


def unrotated(config: PreTrainedConfig) -> set[int]:
    if config.model_type == "cohere2":
        return {layer for layer, kind in enumerate(config.layer_types) if kind == "full_attention"}
    return {layer for layer, turns in enumerate(getattr(config, "no_rope_layers", ())) if not turns}


def ropes_of(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Of all layers, or of those without and those with a window."""
    by_layer = [config.rope_parameters.get(kind) for kind in ("full_attention", "sliding_attention")]
    return [as_compared(rope) for rope in by_layer if rope] or [as_compared(config.rope_parameters)]


def as_compared(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Without the old name of rope_type, and a part that is the whole."""
    left_out = [("type", rope.get("type")), ("partial_rotary_factor", 1.0)]
    return {name: value for name, value in rope.items() if (name, value) not in left_out}


def as_services_read_it(folder: Path, written: Mapping[str, Any]) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(written))
    base, spec, model = (
        BaseConfig.from_folder(folder),
        ModelSpec.from_config_alone(folder),
        read_config(folder),
    )
    heads = (model.num_heads, model.num_kv_heads, model.head_dim)
    q_size, k_size = heads[0] * heads[2], heads[1] * heads[2]
    if "qkv_proj" in model.fused_projections:
        assert spec.modules["qkv_proj"] == (model.hidden_size, q_size + 2 * k_size)
    else:
        assert spec.modules["q_proj"] == (model.hidden_size, q_size)
        assert spec.modules["k_proj"] == (model.hidden_size, k_size)
    assert (spec.vocab_size, spec.hidden_size) == (model.vocab_size, model.hidden_size)
    assert (spec.max_model_len, spec.tied_head) == (model.max_position_embeddings, model.tied_head)
    assert model.rope_theta == base.rope.values["rope_theta"]
    moe, scales = model.moe, model.multipliers
    multipliers: tuple[float | None, ...] = (None,) * len(MULTIPLIERS)
    if "embedding_multiplier" in base.fields.values:
        multipliers = (scales.embedding, scales.residual, scales.scores, 1 / scales.logits)
    if moe is not None:
        assert spec.moe is not None and spec.moe.num_experts == moe.num_experts
        assert spec.moe.layers == {layer for layer, sparse in enumerate(moe.layers) if sparse}
        assert spec.modules["experts.w2"][0] == moe.intermediate_size
    else:
        assert spec.modules["down_proj" if model.gated else "c_proj"][0] == model.intermediate_size
    return {
        "sizes": (spec.vocab_size, spec.hidden_size, spec.num_layers),
        "inner": model.intermediate_size,
        "heads": heads,
        "length": spec.max_model_len,
        "tied": spec.tied_head,
        "rope": [as_compared(rope.values) for rope in (base.rope, base.window_rope) if rope],
        "eps": model.rms_norm_eps,
        "logit scale": scales.logits if "logit_scale" in base.fields.values else None,
        "windows": model.windows,
        "multipliers": multipliers,
        "caps": (model.soft_caps.scores, model.soft_caps.logits),
        "unrotated": model.unrotated,
        "experts": moe.num_experts if moe else None,
        "expert layers": moe.layers if moe else None,
        "top_k": moe.top_k if moe else None,
        "expert widths": (moe.intermediate_size, moe.shared_intermediate_size) if moe else None,
    }


def assert_same(architecture: str, folder: Path, written: Mapping[str, Any]) -> None:
    assert as_services_read_it(folder, written) == as_the_class_has_it(architecture, written)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_defaults_are_those_of_the_class(architecture: str) -> None:
    theirs = {field.name: field.default for field in fields(CLASSES[architecture])}
    assert dict(FAMILIES[architecture].defaults).items() <= theirs.items()


@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_the_class_writes_is_read_as_it_was_meant_with_each_field_left_out(
    architecture: str, tmp_path: Path
) -> None:
    written = written_by(architecture)
    assert_same(architecture, tmp_path, written)
    for name in written.keys() - {"architectures"}:
        left = {other: value for other, value in written.items() if other != name}
        if name in ("num_hidden_layers", "use_sliding_window", "sliding_window"):
            left.pop("layer_types", None)  # a list of as many, of which some have the window
            left.pop("no_rope_layers", None)
        assert_same(architecture, tmp_path, left)
    assert_same(architecture, tmp_path, {"architectures": [architecture]})


@pytest.mark.parametrize("architecture", FAMILIES)
def test_null_is_refused_where_the_class_refuses_it(architecture: str, tmp_path: Path) -> None:
    written = written_by(architecture)
    for name in FAMILIES[architecture].defaults.keys() - {"num_key_value_heads"}:
        nulled = written | {name: None}
        try:
            expected = as_the_class_has_it(architecture, nulled)
        except Exception:
            expected = None
        if expected is None or name in FAILS_LATER:
            with pytest.raises(InvalidModel, match=name):
                as_services_read_it(tmp_path, nulled)
        else:
            try:
                assert as_services_read_it(tmp_path, nulled) == expected
            except UnsupportedModel as error:  # a window of null in layers that are said to have one
                assert "sliding_attention needs" in str(error)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_rope_in_the_spelling_of_either_version(architecture: str, tmp_path: Path) -> None:
    written = written_by(architecture)
    del written["rope_parameters"]
    for rope in ROPES:
        if FAMILIES[architecture].window_rope and (
            rope.get("rope_parameters") or "original_max_position_embeddings" in rope
        ):
            continue  # below; and the class is left without the original length, and its model fails
        if architecture == "Phi3ForCausalLM" and "factor" in str(rope):
            with pytest.raises((UnsupportedModel, InvalidModel), match=r"rope_type|short_factor"):
                as_services_read_it(tmp_path, written | rope)
            continue
        assert_same(architecture, tmp_path, written | rope)


@pytest.mark.parametrize(
    ("rope", "wanted"),
    [
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters must be .* sliding_attention"),
        ({"rope_parameters": {"full_attention": 3}}, "rope_parameters must be .* sliding_attention"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling must be .* rope_type"),
    ],
    ids=str,
)
def test_a_rope_for_each_kind_of_layer_says_which(rope: dict[str, Any], wanted: str, tmp_path: Path) -> None:
    written = written_by("Gemma3ForCausalLM")
    del written["rope_parameters"]
    with pytest.raises(InvalidModel, match=wanted):
        as_services_read_it(tmp_path, written | rope)


def test_key_value_heads_may_be_null_in_every_family(tmp_path: Path) -> None:
    """As in files of earlier versions: as many as query heads."""
    for architecture in FAMILIES:
        facts = as_services_read_it(tmp_path, written_by(architecture) | {"num_key_value_heads": None})
        assert facts["heads"] == (64, 64, 16)


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM"])
def test_the_number_of_experts_has_two_names(architecture: str, tmp_path: Path) -> None:
    names = ("num_experts", "num_local_experts")
    written = {name: value for name, value in written_by(architecture).items() if name not in names}
    for name in names:
        assert_same(architecture, tmp_path, written | {name: 5})
    with pytest.raises(InvalidModel, match=r"num_(local_)?experts = \d, but num_(local_)?experts = \d"):
        as_services_read_it(tmp_path, written | {"num_experts": 5, "num_local_experts": 6})


@pytest.mark.parametrize("model", PUBLISHED, ids=lambda model: model["name"])
def test_published_models(model: Mapping[str, Any], tmp_path: Path) -> None:
    """Config values as public repositories quote them; published.json names each source."""
    written, expected = model["config"], model["expected"]
    assert_same(written["architectures"][0], tmp_path, written)
    base, read = BaseConfig.from_folder(tmp_path), read_config(tmp_path)
    assert {
        "head_dim": base.head_dim,
        "kv_heads": base.num_kv_heads,
        "length": base.max_length,
        "ends": list(read_end_tokens(tmp_path)),
        "theta": read.rope_theta,
        "experts": base.experts.count if base.experts else None,
    } == expected
    assert list(read.eos_token_ids) == expected["ends"]


def test_there_are_enough_published_models() -> None:
    """Of every family, and no two are the same."""
    assert {model["config"]["architectures"][0] for model in PUBLISHED} == FAMILIES.keys()
    assert len({model["name"] for model in PUBLISHED}) == len(PUBLISHED) >= 40
    assert all(model["source"].startswith("https://") for model in PUBLISHED)
