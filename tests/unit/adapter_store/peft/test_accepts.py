"""Well-formed adapters: ranks and scales are PEFT's own, values are bit-equal, prefixes do not matter."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer

from adapter_store import DiskStore, InvalidAdapter, ModelSpec, PushOptions, Version, Weights
from adapter_store.manifest import AS_IT_COMES
from tests.support.adapters.peft import (
    CONFIGS,
    DENSE,
    TABLES,
    Kind,
    dense,
    edit_config,
    load_adapter,
    load_base,
    lora_pair,
    make_adapter,
    make_base,
    raw_adapter,
    read_tensors,
    rewrite,
)

EVERYTHING = (*DENSE, "embed_tokens", "lm_head")


def push(store: DiskStore, folder: Path, spec: ModelSpec, options: PushOptions = AS_IT_COMES) -> Version:
    return store.put(folder, "default", "x", spec, options)


def peft_path(module: str) -> str:
    parts = module.split(".")
    if len(parts) == 1:
        return module if module == "lm_head" else f"model.{module}"
    return f"model.layers.{parts[1]}.{'self_attn' if parts[2][0] in 'qkvo' else 'mlp'}.{parts[2]}"


def check_against_peft(base: Path, folder: Path, weights: Weights) -> None:
    """Every module that PEFT applies is there, with its rank, its scale and its delta, and no other."""
    model = load_adapter(base, folder).get_base_model()
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    loud = {
        name: layer
        for name, layer in layers.items()
        if any(p.any() for n, p in layer.named_parameters() if "_B" in n)
    }
    assert {peft_path(module) for module in weights} == loud.keys()
    for name, module in weights.items():
        layer = loud[peft_path(name)]
        assert (module.rank, module.scale) == (layer.r["default"], np.float32(layer.scaling["default"]))
        a, b = (torch.from_numpy(m.astype(np.float32)) for m in (module.lora_a, module.lora_b))
        delta = (b.T @ a * module.scale).T if name == "embed_tokens" else b.T @ a * module.scale
        assert torch.allclose(delta, layer.get_delta_weight("default").detach(), atol=1e-6)


def test_a_rank_as_high_as_both_widths(tmp_path: Path, store: DiskStore) -> None:
    """A and B have one shape then, which says nothing of their order."""
    base = make_base(tmp_path / "base")
    folder = make_adapter(tmp_path / "a", base, seed=3, rank=64, targets=["o_proj"])
    with store.open(push(store, folder, ModelSpec.from_folder(base)).digest) as weights:
        check_against_peft(base, folder, weights)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_family_and_module(tmp_path: Path, store: DiskStore, kind: Kind, tied: bool) -> None:
    base = make_base(tmp_path / "base", kind, tied=tied)
    everything = (*dense(kind), *TABLES)
    folder = make_adapter(tmp_path / "a", base, seed=3, targets=everything)
    version = push(store, folder, ModelSpec.from_folder(base))
    assert version.manifest.module_kinds == set(everything)
    assert len(version.manifest.modules) == 2 * len(dense(kind)) + 2
    with store.open(version.digest) as weights:
        check_against_peft(base, folder, weights)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"rank": 16, "alpha": 16, "use_rslora": True, "targets": ["q_proj"]},
            {"layers.0.q_proj": (16, 4.0)},
        ),
        (
            {
                "rank": 2,
                "alpha": 8,
                "use_rslora": True,
                "targets": ["q_proj", "k_proj"],
                "rank_pattern": {"k_proj": 4},
            },
            {"layers.0.q_proj": (2, np.float32(8 / 2**0.5)), "layers.0.k_proj": (4, 4.0)},
        ),
        (
            {
                "rank": 2,
                "alpha": 8,
                "targets": ["q_proj", "k_proj"],
                "rank_pattern": {"k_proj": 4},
                "alpha_pattern": {"layers.1.self_attn.k_proj": 64},
            },
            {"layers.1.q_proj": (2, 4.0), "layers.0.k_proj": (4, 2.0), "layers.1.k_proj": (4, 16.0)},
        ),
        (
            {"rank": 2, "alpha": 8, "targets": ["k_proj"], "rank_pattern": {"layers\\.[1-9]\\..*k_proj": 4}},
            {"layers.0.k_proj": (2, 4.0), "layers.1.k_proj": (4, 2.0)},
        ),
        (
            {"rank": 2, "alpha": 8, "targets": ["k_proj"], "rank_pattern": {"^k_proj": 4}},
            {"layers.0.k_proj": (2, 4.0), "layers.1.k_proj": (2, 4.0)},
        ),
        ({"alpha": 3.5, "targets": ["up_proj"]}, {"layers.0.up_proj": (4, 0.875)}),
        (
            {"targets": ["lm_head", "q_proj"], "rank_pattern": {"lm_head": 8}},
            {"lm_head": (8, 1.0), "layers.0.q_proj": (4, 2.0)},
        ),
        ({"layers": [1], "targets": ["q_proj"]}, {"layers.1.q_proj": (4, 2.0)}),
        ({"targets": r".*\.layers\.0\..*v_proj"}, {"layers.0.v_proj": (4, 2.0)}),
        ({"targets": "all-linear"}, {"layers.0.down_proj": (4, 2.0)}),
        ({"init_lora_weights": "gaussian", "targets": ["q_proj"]}, {"layers.0.q_proj": (4, 2.0)}),
    ],
)
def test_ranks_and_scales(
    tmp_path: Path,
    d0: Path,
    spec: ModelSpec,
    store: DiskStore,
    options: dict[str, Any],
    expected: dict[str, tuple[int, float]],
) -> None:
    folder = make_adapter(tmp_path / "a", d0, seed=5, **options)
    version = push(store, folder, spec)
    found = {module.name: (module.rank, module.scale) for module in version.manifest.modules}
    assert found.items() >= expected.items()
    with store.open(version.digest) as weights:
        check_against_peft(d0, folder, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_are_bit_equal(
    tmp_path: Path, full_adapter: Path, spec: ModelSpec, store: DiskStore, dtype: Any
) -> None:
    folder = shutil.copytree(full_adapter, tmp_path / "a")
    mixed = dtype is torch.bfloat16
    rewrite(
        folder,
        lambda ts: {
            n: t if "base_layer" in n or (mixed and "lora_A" in n) else t.to(dtype) for n, t in ts.items()
        },
    )
    source = read_tensors(folder)
    with store.open(push(store, folder, spec).digest) as weights:
        for name, module in weights.items():
            path, embedding = peft_path(name), name == "embed_tokens"
            a, b = (
                source[
                    f"base_model.model.{path}."
                    + (f"lora_embedding_{half}" if embedding else f"lora_{half}.weight")
                ]
                for half in "AB"
            )
            assert module.lora_a.tobytes() == a.view(torch.uint8).numpy().tobytes()
            assert module.lora_b.tobytes() == b.T.contiguous().view(torch.uint8).numpy().tobytes()
            assert module.lora_a.shape == (4, spec.modules[name.rpartition(".")[2]][0])
            assert not module.lora_b.flags.writeable and module.lora_b.flags.c_contiguous


def renamed(folder: Path, old: str, new: str) -> None:
    rewrite(folder, lambda tensors: {name.replace(old, new, 1): t for name, t in tensors.items()})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("base_model.model.model.", "base_model.model."),
        ("base_model.model.model.", "base_model.model.model.language_model."),
        ("base_model.model.model.", "base_model.model.language_model.model."),
        ("base_model.model.", ""),
        ("base_model.model.model.", ""),
        (".weight", ".default.weight"),
    ],
)
def test_known_prefixes_mean_the_same_adapter(
    adapter: Path, dense_adapter: Path, spec: ModelSpec, store: DiskStore, old: str, new: str
) -> None:
    renamed(adapter, old, new)
    assert push(store, adapter, spec).digest == push(store, dense_adapter, spec).digest


@pytest.mark.parametrize(
    "targets", [["q_proj"], ["q_proj", "v_proj"], ["k_proj"], ["gate_proj"], ["up_proj"]]
)
def test_parts_of_packed_projections(
    tmp_path: Path, d0: Path, spec: ModelSpec, store: DiskStore, targets: list[str]
) -> None:
    version = push(store, make_adapter(tmp_path / "a", d0, seed=6, targets=targets), spec)
    assert version.manifest.module_kinds == set(targets)


def test_other_modules_in_each_layer(tmp_path: Path, spec: ModelSpec, store: DiskStore) -> None:
    tensors = lora_pair("model.layers.0.self_attn.v_proj", 64, 32) | lora_pair(
        "model.layers.1.self_attn.q_proj", 64, 64
    )
    version = push(store, raw_adapter(tmp_path / "a", tensors), spec)
    assert [module.name for module in version.manifest.modules] == ["layers.0.v_proj", "layers.1.q_proj"]


@pytest.mark.parametrize(
    "fields",
    [
        {"corda_config": None, "eva_config": None, "exclude_modules": None, "lora_bias": False},
        {"future_flag": None, "future_list": [], "future_map": {}, "future_text": "", "future_number": 0},
        {"bias": "all"},  # of a base without biases
        {"bias": "lora_only"},
        {"base_model_name_or_path": None},
        {"lora_alpha": 8.0},
        {"target_modules": "all-linear"},
        {"target_modules": ".*_proj"},
        {"target_modules": None},
        {"rank_pattern": None, "alpha_pattern": None},
        {"peft_type": "lora"},
        {"init_lora_weights": False},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"lora_dropout": 0.1, "inference_mode": False, "task_type": None, "revision": "main"},
        {"megatron_core": "megatron.core", "qalora_group_size": 16},
        {"layers_to_transform": [0, 1], "layers_pattern": "layers"},
    ],
)
def test_config_dialects_do_not_change_the_adapter(
    adapter: Path, dense_adapter: Path, spec: ModelSpec, store: DiskStore, fields: dict[str, Any]
) -> None:
    edit_config(adapter, **fields)
    assert push(store, adapter, spec).digest == push(store, dense_adapter, spec).digest


def test_a_converted_pissa_adapter_has_twice_the_rank(
    tmp_path: Path, d0: Path, spec: ModelSpec, store: DiskStore
) -> None:
    model = get_peft_model(
        load_base(d0), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa")
    )
    model.peft_config[
        "default"
    ].init_lora_weights = True  # as PEFT's guide has it, for the starting point only
    model.save_pretrained(tmp_path / "start")
    model.peft_config["default"].init_lora_weights = "pissa"
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.add_(0.1)
    model.save_pretrained(tmp_path / "trained")
    with pytest.raises(InvalidAdapter, match="init_lora_weights is 'pissa'"):
        push(store, tmp_path / "trained", spec)
    model.save_pretrained(
        tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "start")
    )
    version = push(store, tmp_path / "converted", spec)
    assert version.manifest.max_rank == 8
    with store.open(version.digest) as weights:
        check_against_peft(d0, tmp_path / "converted", weights)


def test_a_byte_order_mark_is_fine(adapter: Path, spec: ModelSpec, store: DiskStore) -> None:
    config = adapter / "adapter_config.json"
    config.write_text(config.read_text(), encoding="utf-8-sig")
    push(store, adapter, spec)


def test_a_missing_alpha_is_pefts_default_and_warned_about(
    adapter: Path, spec: ModelSpec, store: DiskStore
) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    del config["lora_alpha"]
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    version = push(store, adapter, spec)
    assert version.manifest.modules[0].scale == 2.0
    assert any("lora_alpha" in warning.message for warning in version.push.warnings)


def test_a_pickle_beside_the_weights_is_ignored(adapter: Path, spec: ModelSpec, store: DiskStore) -> None:
    (adapter / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    push(store, adapter, spec)


@pytest.mark.parametrize(("base_dtype", "trained_in"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_frozen_base_copies_may_have_another_dtype(
    tmp_path: Path, store: DiskStore, base_dtype: str, trained_in: str
) -> None:
    base = make_base(tmp_path / "base", dtype=getattr(torch, base_dtype))
    model = load_base(base, getattr(torch, trained_in))
    folder = make_adapter(tmp_path / "a", model, seed=1, targets=["lm_head", "embed_tokens"])
    assert push(store, folder, ModelSpec.from_folder(base)).manifest.module_kinds == {
        "lm_head",
        "embed_tokens",
    }


@pytest.mark.parametrize("targets", [["embed_tokens"], ["embed_tokens", "lm_head"], ["q_proj"]])
def test_tied_weights_are_honoured(tmp_path: Path, d0t: Path, store: DiskStore, targets: list[str]) -> None:
    folder = make_adapter(tmp_path / "a", d0t, seed=1, targets=targets, ensure_weight_tying=True)
    with store.open(push(store, folder, ModelSpec.from_folder(d0t)).digest) as weights:
        if "embed_tokens" in targets:
            assert np.array_equal(weights["lm_head"].lora_a, weights["embed_tokens"].lora_b)


def test_a_head_adapter_on_a_tied_base_leaves_the_embedding_alone(
    tmp_path: Path, d0t: Path, store: DiskStore
) -> None:
    folder = make_adapter(tmp_path / "a", d0t, seed=1, targets=["q_proj", "lm_head"])
    assert push(store, folder, ModelSpec.from_folder(d0t)).manifest.module_kinds == {"q_proj", "lm_head"}


def test_another_base_name_is_a_warning_unless_strict(
    adapter: Path, spec: ModelSpec, store: DiskStore
) -> None:
    edit_config(adapter, base_model_name_or_path="acme/d0")
    assert push(store, adapter, spec, PushOptions(strict_base=True)).push.warnings == ()
    edit_config(adapter, base_model_name_or_path="acme/other", lora_alpha=9)
    [warning] = push(store, adapter, spec).push.warnings
    assert warning.reason == "OTHER_BASE_MODEL" and "acme/other" in warning.message
