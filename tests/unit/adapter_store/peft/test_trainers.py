"""Folders as common trainers leave them: whatever lies beside the adapter, it is the version PEFT writes.

What is written here are file layouts and config fields that each of them was seen to write.
"""

import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model

from adapter_store import DiskStore, InvalidAdapter, ModelSpec, Ref
from adapter_store.peft.source import UNSERVED_FILES
from tests.support.adapters.peft import edit_config, load_base, rewrite

JSON, PICKLE = b"{}\n", pickle.dumps({"never": "loaded"})
# What the Trainer of transformers leaves in a checkpoint.
CHECKPOINT: Mapping[str, bytes] = {
    "README.md": b"---\nlibrary_name: peft\n---\n",
    "optimizer.pt": PICKLE,
    "rng_state.pth": PICKLE,
    "scheduler.pt": PICKLE,
    "trainer_state.json": JSON,
    "training_args.bin": PICKLE,
}
TOKENIZER: Mapping[str, bytes] = {
    "special_tokens_map.json": JSON,
    "tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}).encode(),
}


def peft(folder: Path) -> Mapping[str, bytes]:
    return {"README.md": b""}


def unsloth(folder: Path) -> Mapping[str, bytes]:
    """Its configs name a 4-bit copy of the base, a pattern of modules, and its mark in auto_mapping."""
    mapping = {"base_model_class": "LlamaForCausalLM", "parent_library": "x", "unsloth_fixed": True}
    edit_config(
        folder,
        auto_mapping=mapping,
        base_model_name_or_path="unsloth/d0-bnb-4bit",
        target_modules=r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|k_proj|v_proj).*?)|(?:\bmodel)",
    )
    return TOKENIZER


def axolotl(folder: Path) -> Mapping[str, bytes]:
    """It saves the base's config, a processor and its own settings beside the adapter, and writes what its
    own config says of PEFT's fields: those that PEFT ignores for such a base, too."""
    edit_config(folder, lora_dropout=0.05, fan_in_fan_out=True, loftq_config={"loftq_bits": 4})
    own = ("config.json", "preprocessor_config.json", "debug.log", "tokens_per_second", "tokens_state.json")
    return {**CHECKPOINT, **TOKENIZER, **dict.fromkeys(own, JSON)}


def ms_swift(folder: Path) -> Mapping[str, bytes]:
    """Its configs are PEFT's, with an empty list for null; its own fields are in a second file."""
    edit_config(folder, modules_to_save=[], revision=None)
    additional = json.dumps({"lora_dtype": None, "lorap_lr_ratio": None, "lorap_emb_lr": 1e-6}).encode()
    return {**CHECKPOINT, "additional_config.json": additional, "args.json": JSON}


def ms_swift_2(folder: Path) -> Mapping[str, bytes]:
    """Before it had a second file, with the learning rates of LoRA+ and the type that weights trained in."""
    own = {"swift_type": "LORA", "lora_dtype": "AUTO", "lorap_lr_ratio": 16.0, "lorap_emb_lr": 1e-06}
    edit_config(
        folder, **own, use_qa_lora=False, use_merged_linear=False, enable_lora=None, model_key_mapping=None
    )
    return {**CHECKPOINT, "sft_args.json": JSON}


def llama_factory(folder: Path) -> Mapping[str, bytes]:
    """The final adapter, its last checkpoint as a folder within, logs and a picture; of PPO the value head,
    which scores answers and changes none."""
    (folder / "checkpoint-300").mkdir()
    (folder / "checkpoint-300" / "adapter_model.safetensors").write_bytes(b"another one")
    edit_config(folder, base_model_name_or_path="/models/d0/")
    names = ("all_results.json", "train_results.json", "trainer_log.jsonl", "training_loss.png")
    names += ("value_head.safetensors",)
    return {**CHECKPOINT, **TOKENIZER, **dict.fromkeys(names, JSON)}


@pytest.mark.parametrize(
    "trainer", [peft, unsloth, axolotl, ms_swift, ms_swift_2, llama_factory], ids=lambda t: t.__name__
)
def test_their_folders(
    adapter: Path,
    store: DiskStore,
    spec: ModelSpec,
    trainer: Callable[[Path], Mapping[str, bytes]],
    tmp_path: Path,
) -> None:
    plain = store.put(adapter, "acme", "plain", spec)
    for name, content in trainer(adapter).items():
        (adapter / name).write_bytes(content)
    version = store.put(adapter, "acme", trainer.__name__.replace("_", "-"), spec)
    assert version.digest == plain.digest
    store.export(Ref("acme", version.name, digest=version.digest), tmp_path / "out")
    kept = {file.name for file in (tmp_path / "out").iterdir()}
    assert kept <= {"README.md", "adapter_config.json", "adapter_model.safetensors", *TOKENIZER}


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.removeprefix("base_model.model."),
        lambda name: name.removeprefix("base_model.model.model."),
        lambda name: name.replace(".weight", ".default.weight"),
        lambda name: name.replace("base_model.model.model.", "base_model.model.model.language_model."),
    ],
    ids=["without PEFT's prefix", "without any", "with the adapter's name", "text part of a larger model"],
)
def test_their_key_names(
    adapter: Path, store: DiskStore, spec: ModelSpec, rename: Callable[[str], str]
) -> None:
    plain = store.put(adapter, "acme", "plain", spec)
    rewrite(adapter, lambda tensors: {rename(name): tensor for name, tensor in tensors.items()})
    assert store.put(adapter, "acme", "other", spec).digest == plain.digest


def test_what_sharded_training_forgot_to_gather(adapter: Path, store: DiskStore, spec: ModelSpec) -> None:
    """Axolotl and others with DeepSpeed or FSDP, saved from one rank: tensors of no elements."""
    rewrite(adapter, lambda tensors: {name: tensor[:0] for name, tensor in tensors.items()})
    with pytest.raises(InvalidAdapter, match="gather shards before saving"):
        store.put(adapter, "acme", "x", spec)


@pytest.mark.parametrize("name", UNSERVED_FILES)
def test_weights_beside_the_adapter_are_refused_by_name(
    adapter: Path, store: DiskStore, spec: ModelSpec, name: str
) -> None:
    """Image-text trainers keep a projector there, LongLoRA embeddings and norms."""
    (adapter / name).write_bytes(PICKLE)
    with pytest.raises(InvalidAdapter, match=name):
        store.put(adapter, "acme", "x", spec)


def test_what_peft_saves_of_two_adapters(d0: Path, tmp_path: Path, store: DiskStore, spec: ModelSpec) -> None:
    """Preference training has the adapter that it began with beside the trained one: whichever comes first
    by its name, only the caller knows which is meant."""
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(load_base(d0), config, adapter_name="trained")
    model.add_adapter("reference", config)
    model.save_pretrained(str(tmp_path / "out"))
    with pytest.raises(InvalidAdapter, match=r"reference/, trained/ in it have adapters, push the one that"):
        store.put(tmp_path / "out", "acme", "x", spec)


def test_what_peft_saves_of_a_model_that_it_wrapped_twice(
    d0: Path, tmp_path: Path, store: DiskStore, spec: ModelSpec
) -> None:
    """The file holds both, the config tells of the second alone: its scale may be wrong for the first."""
    first, second = (
        LoraConfig(r=4, target_modules=[name], task_type="CAUSAL_LM") for name in ("q_proj", "v_proj")
    )
    get_peft_model(get_peft_model(load_base(d0), first), second).save_pretrained(str(tmp_path / "out"))
    with pytest.raises(InvalidAdapter, match="that PEFT wrapped twice: give get_peft_model the plain model"):
        store.put(tmp_path / "out", "acme", "x", spec)


def test_another_tuner_of_ms_swift(adapter: Path, store: DiskStore, spec: ModelSpec) -> None:
    edit_config(adapter, swift_type="LONGLORA")
    with pytest.raises(InvalidAdapter, match="swift_type is 'LONGLORA', only LORA is served"):
        store.put(adapter, "acme", "x", spec)
