"""What a version needs is looked for once; a version that fits nowhere is refused every time."""

from dataclasses import replace

import pytest

from adapter_store import Manifest, ModelSpec, ModuleInfo, Version
from scheduler import slot_needs
from scheduler.errors import IncompatibleAdapter
from scheduler.slot_needs import Needs, SlotNeeds

SPEC = ModelSpec(
    fingerprint="0" * 64,
    architecture="LlamaForCausalLM",
    num_layers=2,
    vocab_size=128,
    tied_head=False,
    hidden_size=64,
    modules={"q_proj": (64, 64), "down_proj": (96, 64)},
    max_model_len=512,
    name="base",
)


def version(digest: str, *modules: ModuleInfo) -> Version:
    manifest = Manifest(digest, modules, ("F32",), 10, "", None, None, ())
    return Version("acme", "adapter", digest, manifest, 0.0, protected=False)


def module(name: str, rank: int, inputs: int = 64) -> ModuleInfo:
    return ModuleInfo(name, rank, 1.0, inputs, 64)


def test_the_highest_rank_and_every_kind() -> None:
    needs = SlotNeeds(SPEC)
    adapter = version("sha256:a", module("layers.0.q_proj", 4), module("layers.1.down_proj", 8, 96))
    assert needs.of(adapter) == Needs(8, frozenset({"q_proj", "down_proj"}))
    assert Needs() == Needs(0, frozenset())


def test_a_digest_is_looked_through_once() -> None:
    needs = SlotNeeds(SPEC)
    adapter = version("sha256:a", module("layers.0.q_proj", 4))
    known = needs.of(adapter)
    # The same digest is the same content: what stands in the manifest is not read again.
    changed = replace(adapter, manifest=replace(adapter.manifest, modules=()))
    assert needs.of(changed) is known


def test_a_version_for_another_base_is_refused_every_time() -> None:
    needs = SlotNeeds(SPEC)
    for _ in range(2):
        with pytest.raises(IncompatibleAdapter, match=r"layers\.5\.q_proj"):
            needs.of(version("sha256:b", module("layers.5.q_proj", 4)))


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_needs, "MAX_REMEMBERED", 2)
    needs = SlotNeeds(SPEC)
    first = needs.of(version("sha256:0", module("layers.0.q_proj", 4)))
    for number in (1, 2):
        needs.of(version(f"sha256:{number}", module("layers.0.q_proj", 4)))
    again = needs.of(version("sha256:0", module("layers.0.q_proj", 4)))
    assert again == first and again is not first
