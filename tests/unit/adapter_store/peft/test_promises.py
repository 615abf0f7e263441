"""A config that promises what the weights do not hold: told at the push, as PEFT's own loading never does."""

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModel

from adapter_store import InvalidAdapter, ModelSpec
from adapter_store.peft.folder import read_adapter
from tests.support.adapters.expert_files import ExpertAdapter
from tests.support.adapters.moe_models import make_moe_base
from tests.support.adapters.peft import edit_config, lora_pair, make_adapter, make_base, raw_adapter, rewrite

Tensors = dict[str, torch.Tensor]


def told(folder: Path, spec: ModelSpec) -> Mapping[str, str]:
    """Reason to message of all warnings, but for the base's name."""
    warnings = {each.reason: each.message for each in read_adapter(folder, spec).push.warnings}
    warnings.pop("OTHER_BASE_MODEL", None)
    return warnings


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("bases") / "qwen2", "qwen2")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return ModelSpec.from_folder(make_moe_base(tmp_path_factory.mktemp("bases") / "moe", "qwen3-moe"))


def test_a_base_tells_which_modules_have_a_bias(spec: ModelSpec, qwen2: Path, tmp_path: Path) -> None:
    assert spec.biased == frozenset()
    assert ModelSpec.from_folder(qwen2).biased == {"q_proj", "k_proj", "v_proj"}
    all_of_them = make_base(tmp_path / "llama", attention_bias=True, mlp_bias=True)
    assert ModelSpec.from_folder(all_of_them).biased == spec.modules.keys() - {"embed_tokens", "lm_head"}
    router = ModelSpec.from_folder(make_moe_base(tmp_path / "moe", "gpt-oss")).biased
    assert router == {"q_proj", "k_proj", "v_proj", "o_proj", "router"}


def test_an_adapter_that_does_not_write_text(d0: Path, spec: ModelSpec, tmp_path: Path) -> None:
    """Embedding models are made of the same layers: their adapters fit, and answer nonsense."""
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="FEATURE_EXTRACTION")
    model = get_peft_model(AutoModel.from_pretrained(d0), config)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(weight)
    model.save_pretrained(str(tmp_path / "a"))
    [(reason, message)] = told(tmp_path / "a", spec).items()
    assert reason == "OTHER_TASK" and "task_type is 'FEATURE_EXTRACTION'" in message
    for task in ("CAUSAL_LM", None):
        edit_config(tmp_path / "a", task_type=task)
        assert told(tmp_path / "a", spec) == {}


@pytest.mark.parametrize("targets", [["q_proj", "o_proj"], ["o_proj", "up_proj"]], ids=str)
@pytest.mark.parametrize("bias", ["none", "lora_only", "all"])
def test_biases_that_were_trained_and_not_saved(
    qwen2: Path, tmp_path: Path, bias: str, targets: list[str]
) -> None:
    """PEFT up to 0.19 lost those of "lora_only"; a file without those of "all" never was as PEFT saves it."""
    spec = ModelSpec.from_folder(qwen2)
    folder = make_adapter(tmp_path / "a", qwen2, seed=1, targets=targets)
    edit_config(folder, bias=bias)
    if bias == "all":
        with pytest.raises(InvalidAdapter, match=r"bias is 'all'.* k_proj, q_proj, v_proj.* lost"):
            told(folder, spec)
    elif bias == "lora_only" and "q_proj" in targets:
        assert told(folder, spec).keys() == {"LOST_BIASES"}
        assert "no trained bias of q_proj" in told(folder, spec)["LOST_BIASES"]
    else:
        assert told(folder, spec) == {}


@pytest.mark.parametrize("bias", ["lora_only", "all"])
def test_a_base_without_biases_has_none_to_lose(adapter: Path, spec: ModelSpec, bias: str) -> None:
    edit_config(adapter, bias=bias)
    assert told(adapter, spec) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_adapter_that_changes_nothing(adapter: Path, spec: ModelSpec, dtype: torch.dtype) -> None:
    """As PEFT starts it: B is zero; and A where it is of an embedding."""

    def zero(half: str, but: str = "none") -> Callable[[Tensors], Tensors]:
        return lambda tensors: {
            name: (-torch.zeros_like(t) if half in name and but not in name else t).to(dtype)
            for name, t in tensors.items()
        }

    for half in ("lora_A", "lora_B"):
        folder = shutil.copytree(adapter, adapter.parent / half)
        rewrite(folder, zero(half, but="layers.1.mlp.up_proj"))
        assert told(folder, spec) == {}
        rewrite(folder, zero(half))
        assert told(folder, spec).keys() == {"NO_EFFECT"}


def test_what_dora_and_full_heads_change_needs_no_pair(d0: Path, spec: ModelSpec, tmp_path: Path) -> None:
    for config in ({"use_dora": True}, {"modules_to_save": ["lm_head"]}):
        folder = make_adapter(tmp_path / "_".join(config), d0, seed=1, targets=["q_proj"], **config)
        rewrite(folder, lambda tensors: {n: t * 0 if "lora_B" in n else t for n, t in tensors.items()})
        assert told(folder, spec) == {}


def test_experts_that_change_nothing(moe: ModelSpec, tmp_path: Path) -> None:
    adapter = ExpertAdapter.draw(4, 2, 64, 24)
    for form in ("now", "one_by_one"):
        assert "NO_EFFECT" not in told(getattr(adapter, form)(tmp_path / form), moe)
        silent = getattr(adapter.only([]), form)(tmp_path / f"silent-{form}")
        assert "NO_EFFECT" in told(silent, moe)


Q0, Q1 = (lora_pair(f"model.layers.{layer}.self_attn.q_proj", 64, 64) for layer in (0, 1))
UP = lora_pair("model.layers.0.mlp.up_proj", 64, 96)


@pytest.mark.parametrize(
    ("tensors", "config", "reason", "named"),
    [
        (Q0 | Q1, {"target_modules": ["q_proj"]}, None, ""),
        (
            Q0 | Q1,
            {"target_modules": ["q_proj", "k_proj"]},
            "TARGETS_WITHOUT_TENSORS",
            "has k_proj,",
        ),
        (
            Q0 | Q1,
            {"target_modules": ["q_proj", "c_attn"]},
            "TARGETS_WITHOUT_TENSORS",
            "has c_attn,",
        ),
        (
            Q0 | Q1,
            {"target_modules": ["q_proj", *(f"x{n:02}" for n in range(9))]},
            "TARGETS_WITHOUT_TENSORS",
            "has x00, x01, x02 and 6 more",
        ),
        (Q0 | Q1, {"target_modules": ["self_attn.q_proj"]}, None, ""),
        (Q0 | Q1, {"target_modules": ["mlp.q_proj"]}, "TARGETS_WITHOUT_TENSORS", "mlp.q_proj"),
        (Q0 | Q1, {"target_modules": r".*\.(q|k)_proj"}, None, ""),
        (Q0 | Q1, {"target_modules": "all-linear"}, None, ""),
        (Q0, {"target_modules": ["q_proj"]}, "MODULES_WITHOUT_TENSORS", "includes layers.1.q_proj"),
        (Q0, {"target_modules": ["layers.0.self_attn.q_proj"]}, None, ""),
        (Q0, {"target_modules": ["q_proj"], "exclude_modules": ["layers.1.self_attn.q_proj"]}, None, ""),
        (Q0, {"target_modules": ["q_proj"], "layers_to_transform": [0]}, None, ""),
        (Q0, {"target_modules": ["q_proj"], "layers_to_transform": 0}, None, ""),
        (
            Q0 | UP,
            {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 5]},
            "LAYERS_WITHOUT_TENSORS",
            "layers_to_transform has 5, of which",
        ),
        (
            Q0 | lora_pair("lm_head", 64, 128),
            {"target_modules": ["q_proj", "lm_head"], "layers_to_transform": [0]},
            None,
            "",
        ),
    ],
)
def test_modules_and_layers_without_tensors(
    spec: ModelSpec, tmp_path: Path, tensors: Tensors, config: dict[str, Any], reason: str | None, named: str
) -> None:
    found = told(raw_adapter(tmp_path / "a", tensors, **config), spec)
    assert found.keys() == ({reason} if reason else set())
    assert reason is None or named in found[reason]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_peft_writes_promises_no_more_than_it_holds(
    d0: Path, spec: ModelSpec, tmp_path: Path, dtype: torch.dtype
) -> None:
    options: list[dict[str, Any]] = [
        {},
        {"targets": "all-linear"},
        {"targets": ["q_proj", "embed_tokens", "lm_head"]},
        {"targets": ["v_proj", "lm_head"], "modules_to_save": ["lm_head"]},
        {"targets": ["q_proj"], "layers": [1]},
        {"targets": ["layers.0.self_attn.q_proj", "up_proj"]},
    ]
    for number, each in enumerate(options):
        folder = make_adapter(tmp_path / str(number), d0, seed=1, dtype=dtype, **each)
        assert told(folder, spec) == {}, each


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        (["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], ""),
        (["gate_up_proj", "down_proj"], ""),
        ([], ""),
        (["mlp.experts.down_proj"], "has down_proj of the experts, .* are of down_proj, gate_up_proj"),
    ],
)
def test_target_parameters_that_the_shapes_contradict(
    moe: ModelSpec, tmp_path: Path, parameters: list[str], named: str
) -> None:
    folder = ExpertAdapter.draw(4, 2, 64, 24).now(tmp_path / "a")
    edit_config(folder, target_parameters=parameters)
    found = told(folder, moe)
    assert found.keys() == ({"OTHER_PARAMETERS"} if named else set())
    assert re.search(named, found.get("OTHER_PARAMETERS", ""))


def test_parameters_that_the_file_does_not_have(moe: ModelSpec, tmp_path: Path) -> None:
    folder = raw_adapter(tmp_path / "a", Q0 | Q1, target_parameters=["mlp.experts.down_proj"])
    assert "are of none" in told(folder, moe)["OTHER_PARAMETERS"]
