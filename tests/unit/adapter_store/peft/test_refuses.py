"""Fail closed: each refusal names the field, file or tensor, and leaves the store as it was."""

import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adapter_store import (
    AdapterStoreError,
    DiskStore,
    IncompatibleAdapter,
    InvalidAdapter,
    ModelSpec,
    Ref,
)
from adapter_store.peft import source
from tests.support.adapters.peft import edit_config, lora_pair, make_adapter, raw_adapter, rewrite

P0 = "base_model.model.model.layers.0"
QA, QB = f"{P0}.self_attn.q_proj.lora_A.weight", f"{P0}.self_attn.q_proj.lora_B.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def refused(
    store: DiskStore, spec: ModelSpec, tmp_path: Path, leftovers: Callable[[Path], list[str]]
) -> Callable[..., None]:
    def check(
        folder: Path,
        complaint: str,
        error: type[AdapterStoreError] = InvalidAdapter,
        spec: ModelSpec = spec,
    ) -> None:
        with pytest.raises(error, match=complaint):
            store.put(folder, "default", "x", spec)
        assert leftovers(tmp_path / "store") == []

    return check


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lora_bias", True),
        ("bias", "some"),
        ("modules_to_save", ["lm_head"]),
        ("modules_to_save", ["model.norm"]),
        ("modules_to_save", ["score"]),
        ("trainable_token_indices", {"embed_tokens": [5, 7]}),
        ("trainable_token_indices", [5]),
        ("layer_replication", [[0, 2], [1, 2]]),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "mica"),
        ("init_lora_weights", ["pissa"]),
        ("alora_invocation_tokens", [1, 2]),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("arrow_config", {"top_k": 3}),
        ("kasa_config", {"beta": 1}),
        ("velora_config", {"scale": 1}),
        ("monteclora_config", {"num_samples": 2}),
        ("megatron_config", {"a": 1}),
        ("future_flag", {"x": 1}),
        ("future_flag", 1),
        ("peft_type", "LOHA"),
        ("peft_type", None),
        ("r", 3),
        ("r", 0),
        ("r", -4),
        ("r", True),
        ("r", "4"),
        ("r", 4.5),
        ("lora_alpha", 0),
        ("lora_alpha", "8"),
        ("lora_alpha", True),
        ("lora_alpha", float("nan")),
        ("lora_alpha", float("inf")),
        ("lora_alpha", 10**400),
        ("lora_alpha", 1e-50),
        ("use_rslora", "yes"),
        ("ensure_weight_tying", 1),
        ("rank_pattern", {"k_proj": 3}),
        ("rank_pattern", {"k_proj": "4"}),
        ("rank_pattern", {"(a+)+k_proj": 4}),
        ("rank_pattern", ["k_proj"]),
        ("alpha_pattern", {"k_proj": None}),
        ("alpha_pattern", {"[": 8}),
        ("layers_to_transform", [1]),
        ("layers_to_transform", "1"),
        ("base_model_name_or_path", 7),
        ("base_model_name_or_path", "x" * 5000),
        ("base_model_name_or_path", "base\x1b[2J"),
    ],
)
def test_config_fields(adapter: Path, refused: Callable[..., None], field: str, value: object) -> None:
    edit_config(adapter, **{field: value})
    by_tensor = field in ("r", "rank_pattern") and value in (3, {"k_proj": 3})
    refused(adapter, "adapter_config.json says 3" if by_tensor else "scale" if value == 1e-50 else field)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "adapter_config.json is missing"),
        (b"", "adapter_config.json cannot be read"),
        (b"[]", "adapter_config.json is not a JSON object"),
        (b"\xff\xfe", "adapter_config.json cannot be read"),
        (b"[" * 100_000, "adapter_config.json cannot be read"),
        (rb'{"base_model_name_or_path": "\uD800"}', "adapter_config.json cannot be read"),
        (b" " * (5 << 20), "adapter_config.json is larger"),
    ],
)
def test_config_files(
    adapter: Path, refused: Callable[..., None], content: bytes | None, complaint: str
) -> None:
    config = adapter / "adapter_config.json"
    config.unlink() if content is None else config.write_bytes(content)
    refused(adapter, complaint)


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: t for name, t in tensors.items() if name not in names}


def added(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Tensors], Tensors]:
    return lambda old: old | {name: torch.ones(shape, dtype=dtype)}


def poisoned(name: str, value: float) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        tensors[name].view(-1)[-1] = value
        return tensors

    return change


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): t for name, t in tensors.items()}


@pytest.mark.parametrize(
    ("change", "complaint", "error"),
    [
        (lambda tensors: {}, "holds no LoRA tensors", InvalidAdapter),
        (
            lambda tensors: {n: t[:0] for n, t in tensors.items()},
            r"down_proj.lora_A.weight' is empty",
            InvalidAdapter,
        ),
        (
            added("base_model.model.lm_head.lora_A.weight", 0),
            r"lm_head.lora_A.weight' is empty",
            InvalidAdapter,
        ),
        (without(QA), "q_proj.lora_B.weight' has no matching lora_A", InvalidAdapter),
        (without(QB), "q_proj.lora_A.weight' has no matching lora_B", InvalidAdapter),
        (poisoned(QA, float("nan")), f"{QA}' holds NaN", InvalidAdapter),
        (poisoned(QB, float("-inf")), f"{QB}' holds NaN", InvalidAdapter),
        (added(QA, 8, 64), "has rank 8, adapter_config.json says 4", InvalidAdapter),
        (added(QB, 64, 8), "has rank 8, its lora_A has 4", InvalidAdapter),
        (added(QA, 4, 32), "base d0 needs", IncompatibleAdapter),
        (added(QB, 96, 4), "base d0 needs", IncompatibleAdapter),
        (added(QA, 256), "has 1 dimensions", InvalidAdapter),
        (added(QA, 4, 64, dtype=torch.float64), "dtype F64", InvalidAdapter),
        (added(QA, 4, 64, dtype=torch.int32), "dtype I32", InvalidAdapter),
        (added(f"{P0}.self_attn.q_proj.lora_magnitude_vector", 64), "use_dora", InvalidAdapter),
        (
            added("base_model.model.lm_head.weight", 128, 64),
            "lm_head.weight' differs from the base",
            InvalidAdapter,
        ),
        (added("base_model.model.lm_head.weight", 127, 32), "needs", IncompatibleAdapter),
        (
            added("base_model.model.lm_head.modules_to_save.weight", 128, 64),
            "differs from the base",
            InvalidAdapter,
        ),
        (
            added("base_model.model.model.norm.modules_to_save.weight", 64),
            "modules_to_save.*only lm_head and embed_tokens",
            InvalidAdapter,
        ),
        (
            added("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", 2, 64),
            "trainable_token_indices",
            InvalidAdapter,
        ),
        (added(f"{P0}.self_attn.q_proj.lora_B.bias", 64), "bias", InvalidAdapter),
        (added(f"{P0}.input_layernorm.weight", 64), "input_layernorm.weight", InvalidAdapter),
        (added(f"{P0}.mlp.q_proj.lora_A.weight", 4, 64), "mlp.q_proj", InvalidAdapter),
        (added(f"{P0}.mlp.experts.lora_A.weight", 8, 24), "mixture-of-experts", InvalidAdapter),
        (added(f"{P0}.mlp.experts.base_layer.lora_B.weight", 48, 8), "mixture-of-experts", InvalidAdapter),
        (added(f"{P0}.mlp.experts.3.up_proj.lora_A.weight", 4, 64), "mixture-of-experts", InvalidAdapter),
        (added(f"{P0}.mlp.gate.lora_A.weight", 2, 64), "mixture-of-experts router", InvalidAdapter),
        (added("base_model.model.model.embed_tokens.lora_A.weight", 4, 128), "embed_tokens", InvalidAdapter),
        (added("noise", 1), "'noise' is not a LoRA tensor", InvalidAdapter),
        (added(QA.replace("base_model.model.", "")), "is empty|mean the same|dimensions", InvalidAdapter),
        (added(QA.replace(".weight", ".default.weight"), 4, 64), "mean the same thing", InvalidAdapter),
        (added(QA.replace("lora_A", "lora_A.other"), 4, 64), "lora_A.other", InvalidAdapter),
        (renamed("layers.1.", "layers.7."), "layer 7, the base d0 has 2", IncompatibleAdapter),
        (renamed("layers.1.", "layers.01."), "layers.01", InvalidAdapter),
        (renamed("layers.1.", "blocks.1."), "blocks.1", InvalidAdapter),
        (renamed("base_model.model.model.", "base_model.model.transformer."), "transformer", InvalidAdapter),
    ],
)
def test_tensors(
    adapter: Path,
    refused: Callable[..., None],
    change: Callable[[Tensors], Tensors],
    complaint: str,
    error: type[AdapterStoreError],
) -> None:
    rewrite(adapter, change)
    refused(adapter, complaint, error)


@pytest.mark.parametrize(
    ("change", "cause", "error"),
    [
        (lambda t: {n: x.T for n, x in t.items()}, r"\[96, 4\], which is the transpose of", InvalidAdapter),
        (
            lambda t: {n.translate(str.maketrans("AB", "BA")): x for n, x in t.items()},
            "have changed places",
            InvalidAdapter,
        ),
        (
            lambda t: {n: torch.cat([x, x], dim=int("lora_A" in n)) for n, x in t.items()},
            "base d0 needs",
            IncompatibleAdapter,
        ),
        (lambda t: {n: x.reshape(-1) for n, x in t.items()}, "1 dimensions.*gather shards", InvalidAdapter),
        (renamed(".weight", ".second.weight"), "adapter named 'second'", InvalidAdapter),
        (renamed("lora_A.", "lora_down."), "name that PEFT does not write", InvalidAdapter),
        (renamed("lora_B.", "lora.up."), "name that PEFT does not write", InvalidAdapter),
        (renamed("base_model.", "module.base_model."), "inside a wrapper", InvalidAdapter),
        (renamed("base_model.", "_orig_mod.base_model."), "inside a wrapper", InvalidAdapter),
        (renamed(".0.", ".0._fsdp_wrapped_module."), "inside a wrapper", InvalidAdapter),
        (added(QA.replace("lora_A.weight", "lora_E"), 4, 1), "AdaLoRA", InvalidAdapter),
        (
            added("base_model.model.model.embed_tokens.lora_A.weight", 4, 128),
            "PEFT writes lora_embedding_A",
            InvalidAdapter,
        ),
    ],
)
def test_the_reason_told_is_the_cause(
    adapter: Path,
    refused: Callable[..., None],
    change: Callable[[Tensors], Tensors],
    cause: str,
    error: type[AdapterStoreError],
) -> None:
    """Not what follows from it: a transposed tensor looks like one of another rank."""
    rewrite(adapter, change)
    refused(adapter, cause, error)


@pytest.mark.parametrize("name", ["lm_head.base_layer.weight", "model.embed_tokens.base_layer.weight"])
def test_a_trained_base_layer(
    tmp_path: Path, full_adapter: Path, refused: Callable[..., None], name: str
) -> None:
    folder = shutil.copytree(full_adapter, tmp_path / "a")
    rewrite(folder, poisoned(f"base_model.model.{name}", 0.125))
    refused(folder, f"{name}' differs from the base")


def test_a_base_copy_that_cannot_be_compared(
    full_adapter: Path, spec: ModelSpec, refused: Callable[..., None], tmp_path: Path
) -> None:
    refused(full_adapter, "base_layer.weight' may be a trained copy", spec=replace(spec, folder=None))
    refused(full_adapter, "base_layer.weight' may be a trained copy", spec=replace(spec, folder=tmp_path))


@pytest.mark.parametrize("drop", ["lm_head", "embed_tokens"])
def test_tied_weights_that_are_not_tied(
    tmp_path: Path, d0t: Path, refused: Callable[..., None], drop: str
) -> None:
    folder = make_adapter(tmp_path / "a", d0t, seed=1, targets=["embed_tokens"], ensure_weight_tying=True)
    tied = ModelSpec.from_folder(d0t)
    lora = f"{drop}.lora"
    rewrite(folder, lambda tensors: {n: t * 2 if lora in n else t for n, t in tensors.items()})
    refused(folder, "ensure_weight_tying", spec=tied)
    rewrite(folder, lambda tensors: {n: t for n, t in tensors.items() if lora not in n})
    refused(folder, "ensure_weight_tying", spec=tied)


def test_pickles_are_never_loaded(
    tmp_path: Path, adapter: Path, store: DiskStore, spec: ModelSpec, refused: Callable[..., None]
) -> None:
    """A pickle runs code when it is loaded. Beside safetensors it is not looked at, either."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    weights = adapter / "adapter_model.safetensors"
    shutil.copytree(adapter, tmp_path / "both")
    (tmp_path / "both" / "adapter_model.bin").write_bytes(pickle.dumps(Bomb()))
    weights.write_bytes(pickle.dumps(Bomb()))
    refused(adapter, "adapter_model.safetensors")
    weights.rename(adapter / "adapter_model.bin")
    refused(adapter, r"adapter_model.safetensors is missing: adapter_model.bin is a pickle")
    version = store.put(tmp_path / "both", "default", "both", spec)
    store.export(Ref("default", "both", digest=version.digest), tmp_path / "out")
    assert not (tmp_path / "out" / "adapter_model.bin").exists()
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("adapters.safetensors", "is an adapter of mlx-lm; `python -m adapter_store.convert"),
        ("lora.safetensors", "is an adapter of mistral-finetune; `python -m adapter_store.convert"),
        ("x-f16.gguf", "is llama.cpp's; push the PEFT folder"),
        ("checkpoint-9/adapter_model.safetensors", "in it has an adapter, push that folder"),
        ("checkpoint-9/model/adapter_model.safetensors", "in it has an adapter, push that folder"),
    ],
)
def test_what_lies_there_instead_is_told(
    adapter: Path, refused: Callable[..., None], name: str, what: str
) -> None:
    (adapter / name).parent.mkdir(exist_ok=True, parents=True)
    (adapter / "adapter_model.safetensors").rename(adapter / name)
    refused(adapter, f"adapter_model.safetensors is missing: {name.partition('/adapter')[0]}/? {what}")


def test_links_that_lead_out(tmp_path: Path, adapter: Path, refused: Callable[..., None]) -> None:
    """A link would bring any file of this machine into the store."""
    weights = adapter / "adapter_model.safetensors"
    outside = tmp_path / "outside.safetensors"
    weights.rename(outside)
    weights.symlink_to(outside)
    refused(adapter, "adapter_model.safetensors is a link that leads out")
    weights.unlink()
    weights.symlink_to(tmp_path / "nowhere")
    refused(adapter, "cannot be read")
    weights.unlink()
    outside.rename(weights)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "link").symlink_to(adapter)
    refused(elsewhere / "link", "link is a link that leads out")


def test_a_link_inside_the_folder_is_fine(adapter: Path, store: DiskStore, spec: ModelSpec) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "weights")
    (adapter / "adapter_model.safetensors").symlink_to("weights")
    store.put(adapter, "default", "x", spec)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_pipes(adapter: Path, refused: Callable[..., None], name: str) -> None:
    (adapter / name).unlink()
    os.mkfifo(adapter / name)
    refused(adapter, f"{name} is not a regular file")


def test_sources_that_are_no_folders(tmp_path: Path, adapter: Path, refused: Callable[..., None]) -> None:
    refused(tmp_path / "missing", "missing is not a folder")
    refused(adapter / "adapter_config.json", "is not a folder")
    refused(Path("a\0b"), "folder")


def test_files_over_the_limit(
    adapter: Path, refused: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "_MAX_FILE_BYTES", 2000)
    refused(adapter, r"adapter_model.safetensors has \d+ bytes, at most 2000")


@pytest.mark.parametrize("name", ["README.md", "tokenizer_config.json", "generation_config.json"])
def test_texts_over_their_limit(adapter: Path, refused: Callable[..., None], name: str) -> None:
    """A pull, and a look whether a version is whole, have them all in memory."""
    with (adapter / name).open("wb") as file:
        file.truncate((16 << 20) + 1)
    refused(adapter, f"{name} has 16777217 bytes, at most 16777216 are taken")


def test_another_intermediate_size(tmp_path: Path, refused: Callable[..., None]) -> None:
    folder = raw_adapter(tmp_path / "a", lora_pair("model.layers.0.mlp.down_proj", 80, 64))
    refused(
        folder,
        r"down_proj.lora_A.weight' has shape \[4, 80\], the base d0 needs \[4, 96\]",
        IncompatibleAdapter,
    )
