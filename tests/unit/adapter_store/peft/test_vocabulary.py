"""What PEFT itself saves when the embeddings were resized, and when it saves them all without that."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from adapter_store import DiskStore, IncompatibleAdapter, InvalidAdapter, ModelSpec, Ref
from tests.support.adapters.peft import load_base, make_base, read_tensors, rewrite
from tests.support.stores.media import Medium

HEAD, TABLE = "base_model.model.lm_head", "base_model.model.model.embed_tokens"
SAVED = [["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]]
Save = Callable[..., Path]


@pytest.fixture(params=["own head", "tied head"])
def base(request: pytest.FixtureRequest, d0: Path, d0t: Path) -> Path:
    return d0 if request.param == "own head" else d0t


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """A folder as PEFT leaves it, with everything that is trained away from its start."""
    numbers = itertools.count()

    def save(model: PreTrainedModel, embeddings: bool | str = "auto", **config: Any) -> Path:
        folder = tmp_path / f"adapter{next(numbers)}"
        peft_model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **config))
        with torch.no_grad():
            for weight in peft_model.parameters():
                if weight.requires_grad:
                    weight.add_(0.25)
        peft_model.save_pretrained(str(folder), save_embedding_layers=embeddings)
        return folder

    return save


def resized(base: Path, rows: int) -> PreTrainedModel:
    model = load_base(base)
    model.resize_token_embeddings(rows, mean_resizing=False)
    return model


@pytest.mark.parametrize("rows", [132, 120])
@pytest.mark.parametrize(
    "config",
    [
        {},
        *({"modules_to_save": names} for names in SAVED),
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
    ],
    ids=str,
)
def test_a_resized_vocabulary_is_the_reason_told(
    store: DiskStore, base: Path, save: Save, config: dict[str, Any], rows: int
) -> None:
    """Whatever else is odd about the file: PEFT writes a table in up to three copies then."""
    folder = save(resized(base, rows), **({"target_modules": ["q_proj"]} | config))
    with pytest.raises(
        IncompatibleAdapter, match=rf"has {rows} (rows|columns) against the 128 .* resized"
    ) as refusal:
        store.put(folder, "acme", "x", ModelSpec.from_folder(base))
    assert HEAD in str(refusal.value) or TABLE in str(refusal.value)


def test_trained_rows_alone_are_refused_by_their_field(store: DiskStore, base: Path, save: Save) -> None:
    for rows in (128, 132):
        folder = save(resized(base, rows), target_modules=["q_proj"], trainable_token_indices=[5])
        with pytest.raises(InvalidAdapter, match="trainable_token_indices"):
            store.put(folder, "acme", "x", ModelSpec.from_folder(base))


def test_a_table_of_another_base_is_not_called_resized(
    store: DiskStore, d0: Path, save: Save, tmp_path: Path
) -> None:
    other = make_base(tmp_path / "other", vocab_size=160, hidden_size=32, num_attention_heads=2)
    for names in ({"modules_to_save": ["lm_head"]}, {"target_modules": ["lm_head", "embed_tokens"]}):
        folder = save(load_base(other), **({"target_modules": ["q_proj"]} | names))
        with pytest.raises(IncompatibleAdapter, match="the base d0 needs"):
            store.put(folder, "acme", "x", ModelSpec.from_folder(d0))


def test_pairs_alone_need_no_table(store: DiskStore, base: Path, save: Save) -> None:
    """The layers do not know the vocabulary."""
    folder = save(resized(base, 132), embeddings=False, target_modules=["q_proj"])
    store.put(folder, "acme", "x", ModelSpec.from_folder(base))


@pytest.mark.parametrize("names", SAVED, ids=str)
def test_all_embeddings_saved_beside_trained_ones_are_the_same_version(
    store: DiskStore, base: Path, save: Save, names: list[str], tmp_path: Path
) -> None:
    """PEFT then writes a trained table under two names, and the one that it came from."""
    spec = ModelSpec.from_folder(base)
    config = {"target_modules": ["q_proj"], "modules_to_save": names}
    torch.manual_seed(1)
    lean = save(load_base(base), embeddings=False, **config)
    torch.manual_seed(1)
    full = save(load_base(base), embeddings=True, **config)
    assert len(read_tensors(full)) > len(read_tensors(lean))
    version = store.put(full, "acme", "x", spec)
    assert version.digest == store.put(lean, "acme", "lean", spec).digest
    assert sorted(head.name for head in version.manifest.full_heads) == sorted(names)


def test_two_tables_of_one_name_that_differ_are_refused(store: DiskStore, d0: Path, save: Save) -> None:
    folder = save(load_base(d0), embeddings=True, target_modules=["q_proj"], modules_to_save=["lm_head"])
    rewrite(folder, lambda tensors: tensors | {f"{HEAD}.weight": tensors[f"{HEAD}.weight"] * 2})
    with pytest.raises(
        InvalidAdapter, match=r"'.*lm_head.modules_to_save.weight' and '.*' mean the same thing"
    ):
        store.put(folder, "acme", "x", ModelSpec.from_folder(d0))


def test_a_pull_gives_all_the_copies_back(medium: Medium, d0: Path, save: Save, tmp_path: Path) -> None:
    folder = save(load_base(d0), embeddings=True, target_modules=["q_proj"], modules_to_save=["lm_head"])
    store = medium.open()
    version = store.put(folder, "acme", "x", ModelSpec.from_folder(d0))
    store.export(Ref("acme", "x", digest=version.digest), tmp_path / "out")
    pulled, pushed = (each / "adapter_model.safetensors" for each in (tmp_path / "out", folder))
    assert pulled.read_bytes() == pushed.read_bytes()
