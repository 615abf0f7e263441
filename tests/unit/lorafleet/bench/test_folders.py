"""Model folders and adapters for measurements: what they are made for takes them."""

import json
from pathlib import Path

import numpy as np
import pytest

from adapter_store import ModelSpec, Ref, open_store
from adapter_store.peft.folder import read_adapter
from lorafleet.bench import adapters
from lorafleet.bench.adapters import AdapterMaker, Shapes, make_folders, put_into_store
from lorafleet.bench.errors import BenchError
from lorafleet.bench.shapes import SHAPES, write_shapes
from scheduler.text.tokenizer import Tokenizer

EXPERT_PLACES = {
    "gate_proj": "experts.w1",
    "up_proj": "experts.w3",
    "down_proj": "experts.w2",
    **{leaf: f"experts.{leaf}" for leaf in ("w1", "w2", "w3")},
}
NAMES = {0: "bench-0000", 7: "bench-0007"}


@pytest.mark.parametrize("name", SHAPES)
def test_a_folder_of_shapes_is_a_model_to_store_and_scheduler(name: str, tmp_path: Path) -> None:
    write_shapes(name, tmp_path)
    spec = ModelSpec.from_folder(tmp_path)
    assert (spec.num_layers, spec.vocab_size) == (
        SHAPES[name]["num_hidden_layers"],
        SHAPES[name]["vocab_size"],
    )
    for path, sizes in Shapes.of(tmp_path).projections.items():
        kind = path.rpartition(".")[2]
        place = EXPERT_PLACES[kind] if ".experts." in path else kind
        assert spec.modules[place] == sizes, path
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.vocab_size == spec.vocab_size
    assert tokenizer.token_bytes(17) == b"t17 "
    checkpoint = (tmp_path / "model.safetensors").stat()
    assert checkpoint.st_blocks * 512 < max(1 << 20, checkpoint.st_size // 1000), "the checkpoint is a hole"


def test_shapes_of_fewer_layers(tmp_path: Path) -> None:
    write_shapes("mixtral-8x7b", tmp_path, layers=2)
    assert ModelSpec.from_folder(tmp_path).num_layers == 2


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    write_shapes("tiny", tmp_path)
    write_shapes("tiny", tmp_path)
    before = (tmp_path / "config.json").read_text()
    with pytest.raises(BenchError, match="holds something else"):
        write_shapes("tiny-moe", tmp_path)
    assert (tmp_path / "config.json").read_text() == before


def test_unknown_shapes_and_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"gpt-2.*llama-3\.1-8b"):
        write_shapes("gpt-2", tmp_path)
    with pytest.raises(BenchError, match=r"config\.json"):
        Shapes.of(tmp_path)


def test_adapters_of_experts_enter_a_store(tmp_path: Path) -> None:
    write_shapes("tiny-moe", tmp_path / "model")
    store = open_store(str(tmp_path / "store"))
    for name, attention_only in (("all", False), ("attention", True)):
        maker = AdapterMaker.make(Shapes.of(tmp_path / "model", attention_only=attention_only), rank=4)
        put_into_store(maker, str(tmp_path / "store"), tmp_path / "model", {0: name}, lambda _: None)
    versions = [store.resolve(Ref.parse(name, "default")) for name in ("all", "attention")]
    kinds = [version.manifest.module_kinds for version in versions]
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert kinds == [attention | {"experts"}, attention]


def test_shapes_are_those_that_the_services_read(tmp_path: Path) -> None:
    """Qwen3's heads of 128 when the config does not say, and Mixtral's experts under their own name."""
    written = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "num_attention_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert Shapes.of(tmp_path).projections["self_attn.q_proj"] == (64, 4096)
    mixtral = {**SHAPES["tiny-moe"], "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    del mixtral["num_experts"]
    (tmp_path / "config.json").write_text(json.dumps(mixtral))
    spec, shapes = ModelSpec.from_config_alone(tmp_path), Shapes.of(tmp_path)
    assert "block_sparse_moe.experts.3.w2" in shapes.projections
    AdapterMaker.make(shapes, rank=2).write(tmp_path / "adapter", 0)
    read_adapter(tmp_path / "adapter", spec)


def test_adapters_enter_a_store_each_with_its_own_content(tmp_path: Path) -> None:
    write_shapes("tiny", tmp_path / "model")
    maker = AdapterMaker.make(Shapes.of(tmp_path / "model"), rank=4)
    told: list[str] = []
    put_into_store(maker, str(tmp_path / "store"), tmp_path / "model", NAMES, told.append)
    assert told == list(NAMES.values())
    store = open_store(str(tmp_path / "store"))
    versions = [store.resolve(Ref.parse(name, "default")) for name in NAMES.values()]
    assert len({version.digest for version in versions}) == 2
    assert {module.rank for module in versions[0].manifest.modules} == {4}
    assert len(versions[0].manifest.modules) == 2 * 7
    with store.open(versions[0].digest) as weights:
        for module in weights.values():
            for half in (module.lora_a, module.lora_b):
                size = np.abs(half.astype(np.float32))
                assert 2**-9 <= size.min() <= size.max() < 2**-5
                assert (half.astype(np.float32) < 0).any()


def test_the_same_number_is_the_same_adapter(tmp_path: Path) -> None:
    write_shapes("tiny", tmp_path / "model")
    for folder in ("one", "two"):
        maker = AdapterMaker.make(Shapes.of(tmp_path / "model"), rank=2)
        make_folders(maker, tmp_path / folder, NAMES, lambda name: None)
    files = [tmp_path / f / n / "adapter_model.safetensors" for f in ("one", "two") for n in NAMES.values()]
    one, other, again, _ = (file.read_bytes() for file in files)
    assert one == again != other
    assert len(one) == maker.num_bytes


def test_values_made_in_pieces_are_those_made_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One adapter of a model with many experts has more bits than Random makes at once."""
    write_shapes("tiny", tmp_path)
    shapes = Shapes.of(tmp_path)
    at_once = AdapterMaker.make(shapes, rank=2)
    assert len(at_once.block) % 1000 != 0
    monkeypatch.setattr(adapters, "_RANDOM_BYTES", 1000)
    assert AdapterMaker.make(shapes, rank=2).block == at_once.block


def test_an_adapter_that_does_not_fit_is_refused_by_the_store(tmp_path: Path) -> None:
    write_shapes("tiny", tmp_path / "model")
    shapes = Shapes.of(tmp_path / "model")
    narrow = {**shapes.projections, "self_attn.q_proj": (64, 32)}
    wrong = AdapterMaker.make(Shapes(shapes.num_layers, narrow), rank=2)
    with pytest.raises(BenchError, match="q_proj"):
        put_into_store(wrong, str(tmp_path / "store"), tmp_path / "model", NAMES, lambda name: None)
