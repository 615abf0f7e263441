"""Fully trained heads and embeddings (modules_to_save): kept whole, and told; and what is refused of them."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from adapter_store import AdapterStoreError, DiskStore, IncompatibleAdapter, InvalidAdapter, ModelSpec, Ref
from adapter_store.manifest import FullHead, Manifest
from tests.support.adapters.peft import edit_config, load_base, make_adapter, make_base, read_tensors, rewrite
from tests.support.stores.media import Medium, versions_in

HEAD, TABLE = "base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"
BOTH = ["lm_head", "embed_tokens"]
Tensors = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, d0: Path) -> Path:
    """By PEFT. Not to be changed."""
    folder = tmp_path_factory.mktemp("heads") / "both"
    return make_adapter(folder, d0, seed=3, targets=["q_proj"], modules_to_save=BOTH)


@pytest.fixture
def trained(written: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "trained"
    folder.mkdir()
    for file in written.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_the_builder_leaves_its_base_as_it_was(d0: Path, tmp_path: Path) -> None:
    """Other adapters are made from it: PEFT copies its head and table into some of them."""
    base = load_base(d0)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    make_adapter(tmp_path / "both", base, seed=3, targets=["q_proj"], modules_to_save=BOTH)
    after = base.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_it_comes_back_as_it_was_pushed(
    medium: Medium, trained: Path, spec: ModelSpec, tmp_path: Path
) -> None:
    store = medium.open()
    version = store.put(trained, "acme", "x", spec)
    manifest = version.manifest
    assert manifest.full_heads == (FullHead("embed_tokens", 128, 64), FullHead("lm_head", 128, 64))
    assert manifest.module_kinds == {"q_proj"} and Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.num_bytes > 2 * 128 * 64 * 4
    pushed = read_tensors(trained)
    with medium.open().open(version.digest) as weights:
        full = weights.full_heads
        assert np.array_equal(full["lm_head"], pushed[HEAD]) and "lm_head" not in weights
        assert np.array_equal(full["embed_tokens"], pushed[TABLE])
    store.verify(Ref("acme", "x", digest=version.digest))
    store.export(Ref("acme", "x", digest=version.digest), tmp_path / "out")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (trained / file).read_bytes()


def test_another_matrix_is_another_version(store: DiskStore, trained: Path, spec: ModelSpec) -> None:
    first = store.put(trained, "acme", "x", spec)
    rewrite(trained, lambda tensors: tensors | {HEAD: tensors[HEAD] * 2})
    assert store.put(trained, "acme", "x", spec).digest != first.digest


@pytest.mark.parametrize(
    "names", [["lm_head", "model.embed_tokens"], ["model.lm_head", "embed_tokens"]], ids=str
)
@pytest.mark.parametrize(
    "key", ["{}.weight", "{}.modules_to_save.weight", "{}.modules_to_save.default.weight"]
)
def test_other_names_for_the_same(
    store: DiskStore, trained: Path, spec: ModelSpec, names: list[str], key: str
) -> None:
    first = store.put(trained, "acme", "x", spec)
    edit_config(trained, modules_to_save=names)
    heads = {name: key.format(name.removesuffix(".weight")) for name in (HEAD, TABLE)}
    rewrite(trained, lambda tensors: {heads.get(name, name): t for name, t in tensors.items()})
    assert store.put(trained, "acme", "x", spec).digest == first.digest


@pytest.mark.parametrize(
    ("change", "complaint", "error"),
    [
        (lambda t: {n: x for n, x in t.items() if n != HEAD}, "needs a trained lm_head", InvalidAdapter),
        (lambda t: t | {HEAD: torch.zeros(130, 64)}, "130 rows against the 128", IncompatibleAdapter),
        (lambda t: t | {TABLE: torch.zeros(128, 32)}, r"needs \[128, 64\]", IncompatibleAdapter),
        (lambda t: t | {HEAD: t[HEAD].to(torch.int32)}, "dtype I32", InvalidAdapter),
        (lambda t: t | {HEAD: t[HEAD] / 0}, f"{HEAD}' holds NaN", InvalidAdapter),
        (
            lambda t: t | {HEAD.replace("weight", "modules_to_save.weight"): t[HEAD] * 2},
            "mean the same thing",
            InvalidAdapter,
        ),
        (
            lambda t: (
                t
                | {
                    "base_model.model.lm_head.lora_A.weight": torch.ones(4, 64),
                    "base_model.model.lm_head.lora_B.weight": torch.ones(128, 4),
                }
            ),
            "lm_head has LoRA, too",
            InvalidAdapter,
        ),
        (lambda t: {n: x for n, x in t.items() if "lora" not in n}, "0 modules", InvalidAdapter),
    ],
    ids=["missing", "vocabulary", "width", "integers", "nan", "twice", "with LoRA", "alone"],
)
def test_what_does_not_fit_is_refused(
    store: DiskStore,
    trained: Path,
    spec: ModelSpec,
    change: object,
    complaint: str,
    error: type[AdapterStoreError],
) -> None:
    rewrite(trained, change)  # type: ignore[arg-type]
    with pytest.raises(error, match=complaint):
        store.put(trained, "acme", "x", spec)
    assert versions_in(store, "acme") == []


def test_one_matrix_of_a_tied_base_is_written_twice(store: DiskStore, d0t: Path, tmp_path: Path) -> None:
    spec = ModelSpec.from_folder(d0t)
    saved = {"targets": ["q_proj"], "modules_to_save": ["embed_tokens"]}
    tied = make_adapter(tmp_path / "tied", d0t, seed=3, ensure_weight_tying=True, **saved)
    version = store.put(tied, "acme", "tied", spec)
    assert [head.name for head in version.manifest.full_heads] == ["embed_tokens", "lm_head"]
    alone = make_adapter(tmp_path / "alone", d0t, seed=3, **saved)
    version = store.put(alone, "acme", "alone", spec)
    assert [head.name for head in version.manifest.full_heads] == ["embed_tokens"]
    rewrite(tied, lambda tensors: tensors | {HEAD: tensors[HEAD] * 2})
    with pytest.raises(InvalidAdapter, match=r"ensure_weight_tying is true, but .* differ"):
        store.put(tied, "acme", "other", spec)


def test_trained_biases_are_refused_by_name(store: DiskStore, tmp_path: Path) -> None:
    """They stand in for the base's own, which rows of other adapters need beside them."""
    base = make_base(tmp_path / "qwen2", "qwen2")
    adapter = make_adapter(tmp_path / "a", base, seed=1, targets=["q_proj"], bias="lora_only")
    with pytest.raises(InvalidAdapter, match=r"q_proj.*bias.* is a trained bias \(bias, lora_bias\)"):
        store.put(adapter, "acme", "x", ModelSpec.from_folder(base))
