"""DoRA adapters: the magnitude of each output comes along, whole."""

from pathlib import Path

import numpy as np
import pytest
import torch

from adapter_store import InvalidAdapter, ModelSpec, Ref
from tests.support.adapters.peft import edit_config, make_adapter, read_tensors, rewrite
from tests.support.stores.media import Medium, versions_in

TARGETS = ("q_proj", "down_proj", "embed_tokens", "lm_head")
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"
MAGNITUDE = f"{Q_PROJ}.lora_magnitude_vector"


@pytest.fixture
def dora(tmp_path: Path, d0: Path) -> Path:
    return make_adapter(tmp_path / "dora", d0, seed=3, targets=TARGETS, use_dora=True)


def test_it_comes_back_as_it_was_pushed(medium: Medium, dora: Path, spec: ModelSpec, tmp_path: Path) -> None:
    store = medium.open()
    version = store.put(dora, "acme", "x", spec)
    assert all(module.dora for module in version.manifest.modules)
    pushed = read_tensors(dora)
    with medium.open().open(version.digest) as weights:
        magnitude = weights["layers.0.q_proj"].magnitude
        assert magnitude is not None and np.array_equal(magnitude, pushed[MAGNITUDE].numpy())
        assert {m.magnitude.shape for m in weights.values() if m.magnitude is not None} == {(64,), (128,)}
    store.verify(Ref("acme", "x", digest=version.digest))
    store.export(Ref("acme", "x", digest=version.digest), tmp_path / "out")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (dora / file).read_bytes()


def test_another_magnitude_is_another_version(medium: Medium, dora: Path, spec: ModelSpec) -> None:
    store = medium.open()
    first = store.put(dora, "acme", "x", spec)
    rewrite(dora, lambda tensors: tensors | {MAGNITUDE: tensors[MAGNITUDE] * 2})
    assert store.put(dora, "acme", "x", spec).digest != first.digest


def test_what_does_not_fit_is_refused(medium: Medium, dora: Path, spec: ModelSpec) -> None:
    store, whole = medium.open(), read_tensors(dora)

    def refused(tensors: dict[str, torch.Tensor], complaint: str) -> None:
        rewrite(dora, lambda _: tensors)
        with pytest.raises(InvalidAdapter, match=complaint):
            store.put(dora, "acme", "x", spec)

    refused(
        {name: t for name, t in whole.items() if name != MAGNITUDE}, "q_proj.lora_A.weight' has no magnitude"
    )
    refused(whole | {MAGNITUDE: torch.ones(63)}, r"lora_magnitude_vector' has shape \[63\]")
    refused(whole | {MAGNITUDE: torch.full((64,), torch.inf)}, "lora_magnitude_vector' holds NaN or infinity")
    refused(
        {name: t for name, t in whole.items() if not name.startswith(f"{Q_PROJ}.lora_A")},
        "has no matching lora_A",
    )
    edit_config(dora, use_dora=False)
    refused(whole, "belongs to DoRA, but adapter_config.json has no use_dora")
    assert versions_in(store, "acme") == []
