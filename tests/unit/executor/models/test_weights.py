import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_store import InvalidModel
from executor.distributed import ParallelGroup
from executor.errors import BadCheckpoint, UnsupportedModel
from executor.models import load_model
from tests.support.adapters.tiny_models import make_model, save_variant

Tensors = dict[str, torch.Tensor]
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_variant("llama", tmp_path)


def edit(folder: Path, change: Callable[[Tensors], object], file: str = SINGLE) -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)


def load(folder: Path) -> Tensors:
    return dict(load_model(folder, torch.float32, "cpu").named_parameters())


def shard(folder: Path) -> None:
    """One tensor a file in turn over three files, as save_pretrained(max_shard_size=...) leaves them."""
    tensors = load_file(folder / SINGLE)
    homes = {name: f"model-{i % 3 + 1:05}-of-00003.safetensors" for i, name in enumerate(tensors)}
    for file in set(homes.values()):
        save_file({name: tensors[name] for name, home in homes.items() if home == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": homes}))
    (folder / SINGLE).unlink()


def test_parts_are_stacked_in_order(folder: Path) -> None:
    source, loaded = load_file(folder / SINGLE), load(folder)
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    stacked = torch.cat([source[name] for name in names])
    assert torch.equal(loaded["model.layers.1.self_attn.qkv_proj.weight"], stacked)
    stacked = torch.cat([source[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(loaded["model.layers.0.mlp.gate_up_proj.weight"], stacked)


def test_shards_load_like_one_file(folder: Path) -> None:
    whole = load(folder)
    shard(folder)
    parts = load(folder)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_shards_of_transformers_load(tmp_path: Path) -> None:
    model = make_model("qwen2")
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert torch.equal(load(tmp_path)["lm_head.weight"], model.get_output_embeddings().weight)


@pytest.mark.parametrize("name", ["inv_freq", "cos_cached", "sin_cached"])
def test_old_rotary_buffers_are_ignored(folder: Path, name: str) -> None:
    edit(folder, lambda t: t.update({f"model.layers.0.self_attn.rotary_emb.{name}": torch.ones(8)}))
    load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q), f"1 tensors are missing: {Q}"),
        (lambda t: t.pop("lm_head.weight"), "missing: lm_head.weight"),
        (lambda t: t.update({f"{Q}_scale": torch.ones(1)}), f"{SINGLE}: {Q}_scale has no place"),
        (lambda t: t.update({"model.layers.2.norm": torch.ones(1)}), "layers.2.norm has no place"),
        (lambda t: t.update({Q: torch.ones(9, 64)}), rf"{SINGLE}: {Q} is \[9, 64\], .* wants \[64, 64\]"),
        (lambda t: t.update({Q: t[Q].to(torch.int8)}), f"{SINGLE}: {Q} is torch.int8"),
        (lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn)}), f"{Q} is torch.float8"),
    ],
    ids=["part missing", "head missing", "unknown kind", "unknown layer", "shape", "int8", "float8"],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    folder: Path, change: Callable[[Tensors], object], message: str
) -> None:
    edit(folder, change)
    with pytest.raises(BadCheckpoint, match=message):
        load(folder)


def test_a_tied_head_may_be_stored_if_it_is_equal(tmp_path: Path) -> None:
    folder = save_variant("llama-tied", tmp_path)
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load(folder)
    edit(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    with pytest.raises(
        BadCheckpoint, match=r"lm_head.weight differs from the weight that config.json ties it to"
    ):
        load(folder)


def test_no_weights(folder: Path) -> None:
    (folder / SINGLE).unlink()
    with pytest.raises(InvalidModel, match=f"has neither {SINGLE} nor {INDEX}"):
        load(folder)


@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs", b"\xff" * 64], ids=["empty", "pointer", "noise"]
)
def test_damaged_file(folder: Path, content: bytes) -> None:
    (folder / SINGLE).write_bytes(content)
    with pytest.raises(InvalidModel, match=rf"cannot read .*{SINGLE}"):
        load(folder)


def test_truncated_file(folder: Path) -> None:
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:-100])
    with pytest.raises(InvalidModel, match=rf"cannot read .*{SINGLE}"):
        load(folder)


@pytest.mark.parametrize("variant", ["llama-biases", "llama-tied", "qwen3", "olmo2"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_load_their_shares(variant: str, size: int, tmp_path: Path) -> None:
    """4 query heads of 16 over 2 KV heads: with 4 ranks, neighbours hold the same KV head."""
    folder = save_variant(variant, tmp_path)
    source = load_file(folder / SINGLE)
    ranks = [
        dict(load_model(folder, torch.float32, "cpu", ParallelGroup(rank, size)).named_parameters())
        for rank in range(size)
    ]

    def joined(name: str, dim: int = 0) -> torch.Tensor:
        return torch.cat([parameters[name] for parameters in ranks], dim)

    layer = "model.layers.1."
    assert torch.equal(joined("model.embed_tokens.weight"), source["model.embed_tokens.weight"])
    assert torch.equal(
        joined(layer + "self_attn.o_proj.weight", 1), source[layer + "self_attn.o_proj.weight"]
    )
    assert torch.equal(joined(layer + "mlp.down_proj.weight", 1), source[layer + "mlp.down_proj.weight"])
    q, k, v = (source[f"{layer}self_attn.{part}_proj.weight"].chunk(2) for part in "qkv")
    for rank, parameters in enumerate(ranks):
        queries = torch.cat(q).chunk(size)[rank]
        own = torch.cat((queries, k[rank * 2 // size], v[rank * 2 // size]))
        assert torch.equal(parameters[layer + "self_attn.qkv_proj.weight"], own)
        gate, up = (source[f"{layer}mlp.{part}_proj.weight"].chunk(size)[rank] for part in ("gate", "up"))
        assert torch.equal(parameters[layer + "mlp.gate_up_proj.weight"], torch.cat((gate, up)))
        assert torch.equal(parameters["model.norm.weight"], source["model.norm.weight"])
        if variant == "olmo2":
            q_norm, k_norm = (f"{layer}self_attn.{part}_norm.weight" for part in "qk")
            assert torch.equal(parameters[q_norm], source[q_norm].chunk(size)[rank])
            assert torch.equal(parameters[k_norm], source[k_norm].chunk(2)[rank * 2 // size])


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_load_their_shares_of_fused_projections(size: int, tmp_path: Path) -> None:
    """Of q, of k and of v each; with 4 ranks, neighbours hold the same KV head."""
    folder = save_variant("phi3", tmp_path)
    source = load_file(folder / SINGLE)
    for rank in range(size):
        group = ParallelGroup(rank, size)
        parameters = dict(load_model(folder, torch.float32, "cpu", group).named_parameters())
        q, k, v = source["model.layers.1.self_attn.qkv_proj.weight"].split([64, 32, 32])
        own = torch.cat((q.chunk(size)[rank], *(part.chunk(2)[rank * 2 // size] for part in (k, v))))
        assert torch.equal(parameters["model.layers.1.self_attn.qkv_proj.weight"], own)
        gate, up = source["model.layers.1.mlp.gate_up_proj.weight"].chunk(2)
        own = torch.cat((gate.chunk(size)[rank], up.chunk(size)[rank]))
        assert torch.equal(parameters["model.layers.1.mlp.gate_up_proj.weight"], own)


def test_a_wrong_copy_of_a_tied_head_is_found_by_the_rank_that_has_it(tmp_path: Path) -> None:
    folder = save_variant("llama-tied", tmp_path)

    def add_copy(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][-1, 0] += 1

    edit(folder, add_copy)
    load_model(folder, torch.float32, "cpu", ParallelGroup(0, 2))
    with pytest.raises(BadCheckpoint, match=r"lm_head\.weight differs"):
        load_model(folder, torch.float32, "cpu", ParallelGroup(1, 2))


@pytest.mark.parametrize("size", [3, 8])
def test_ranks_that_cannot_share_the_model_are_refused_with_what_can(folder: Path, size: int) -> None:
    wanted = rf"size {size} does not cut this model .*: possible are 1, 2, 4$"
    with pytest.raises(UnsupportedModel, match=wanted):
        load_model(folder, torch.float32, "cpu", ParallelGroup(0, size))
