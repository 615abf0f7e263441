"""Adapters of experts: every layout that PEFT wrote is read as the same adapter, or refused by name."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from adapter_store import (
    DiskStore,
    IncompatibleAdapter,
    InvalidAdapter,
    LoRAModule,
    ModelSpec,
    Ref,
    Weights,
)
from adapter_store.packed.recipe import rebuild, recipe_pieces
from adapter_store.peft.config import EXPERT_ORDER
from adapter_store.peft.folder import read_adapter
from tests.support.adapters.expert_files import ExpertAdapter
from tests.support.adapters.moe_models import make_moe_base
from tests.support.adapters.peft import edit_config, lora_pair, raw_adapter, read_tensors, rewrite

PATH = "base_model.model.model.layers.0.mlp.experts"
INNER, NO_LAYER = f"{PATH}.base_layer", PATH.replace(".0.", ".2.")
HIDDEN, EXPERTS, RANK = 64, 4, 2


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ModelSpec]:
    """One of each family, one whose gate and up together are square, and one with a dense layer."""
    folder, specs = tmp_path_factory.mktemp("bases"), dict[str, ModelSpec]()
    overrides: dict[str, tuple[str, dict[str, Any]]] = {
        "square": ("qwen3-moe", {"moe_intermediate_size": 32}),
        "dense-first": ("qwen3-moe", {"mlp_only_layers": [0]}),
    }

    def spec(name: str) -> ModelSpec:
        if name not in specs:
            family, fields = overrides.get(name, (name, {}))
            specs[name] = ModelSpec.from_folder(make_moe_base(folder / name, family, **fields))
        return specs[name]

    return spec


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[Path, ModelSpec], Weights]]:
    store = DiskStore(tmp_path / "store")
    yield lambda folder, spec: store.open(store.put(folder, "default", folder.name, spec).digest)


def put(folder: Path, spec: ModelSpec) -> None:
    DiskStore(folder.parent / "store").put(folder, "default", "x", spec)


def delta(module: LoRAModule) -> Tensor:
    """[experts, out, in], unscaled."""
    a, b = (torch.from_numpy(np.array(half)) for half in (module.lora_a, module.lora_b))
    return b.transpose(1, 2) @ a


def check_equal(weights: Weights, adapter: ExpertAdapter, names: tuple[str, ...] = ("w13", "w2")) -> None:
    for layer, (a13, b13, a2, b2) in adapter.layers.items():
        gate_up = [delta(weights[f"layers.{layer}.experts.{name}"]) for name in names[:-1]]
        assert torch.equal(torch.cat(gate_up, dim=1), b13 @ a13)
        assert torch.equal(delta(weights[f"layers.{layer}.experts.w2"]), b2 @ a2)


def draw(inner: int = 24) -> ExpertAdapter:
    return ExpertAdapter.draw(EXPERTS, RANK, HIDDEN, inner)


def test_the_spec_knows_every_module(bases: Callable[..., ModelSpec]) -> None:
    spec = bases("qwen2-moe")
    assert spec.moe is not None
    assert {name: shape for name, shape in spec.modules.items() if "expert" in name or name == "router"} == {
        "experts.w1": (64, 24),
        "experts.w3": (64, 24),
        "experts.w13": (64, 48),
        "experts.w2": (24, 64),
        "router": (64, 4),
        "shared_expert.gate_proj": (64, 32),
        "shared_expert.up_proj": (64, 32),
        "shared_expert.down_proj": (32, 64),
        "shared_expert_gate": (64, 1),
    }
    assert "gate_proj" not in spec.modules
    mixed = bases("dense-first")
    assert mixed.has_place_for("layers.0.gate_proj") and not mixed.has_place_for("layers.1.gate_proj")
    assert mixed.has_place_for("layers.1.experts.w2") and not mixed.has_place_for("layers.0.experts.w2")
    assert bases("gpt-oss").path_of("layers.1.router") == "model.layers.1.mlp.router"


@pytest.mark.parametrize("base", ["qwen3-moe", "square", "mixtral", "gpt-oss"])
def test_a_fused_adapter_is_packed_by_expert(
    base: str, bases: Callable[..., ModelSpec], opened: Callable[..., Weights], tmp_path: Path
) -> None:
    adapter = draw(32 if base == "square" else 24)
    weights = opened(adapter.now(tmp_path / "now"), bases(base))
    check_equal(weights, adapter)
    module = weights["layers.1.experts.w13"]
    a13, b13, _, _ = adapter.layers[1]
    assert np.array_equal(module.lora_a, a13.numpy())
    assert np.array_equal(module.lora_b, b13.transpose(1, 2).numpy())
    assert (module.rank, module.scale) == (RANK, 4.0)


@pytest.mark.parametrize(("base", "inner"), [("qwen3-moe", 24), ("square", 32), ("mixtral", 24)])
def test_both_layouts_are_one_version(
    base: str, inner: int, bases: Callable[..., ModelSpec], tmp_path: Path
) -> None:
    """Where gate and up are square only the down pair tells them apart; one digest means the same bytes."""
    store, adapter, spec = DiskStore(tmp_path / "store"), draw(inner), bases(base)
    old = adapter.before_019(tmp_path / "old")
    shapes = {name: list(tensor.shape) for name, tensor in read_tensors(old).items()}
    assert shapes[f"{PATH}.base_layer.lora_A.weight"] == [8, 2 * inner]
    assert shapes[f"{PATH}.lora_B.weight"] == [inner, 8]
    versions = [store.put(folder, "default", "x", spec) for folder in (adapter.now(tmp_path / "now"), old)]
    assert versions[0].digest == versions[1].digest


def test_a_pair_that_fits_both_layouts_needs_the_version(
    bases: Callable[..., ModelSpec], opened: Callable[..., Weights], tmp_path: Path
) -> None:
    """Gate and up alone, on a base where they are square."""
    adapter = draw(32)
    folder = adapter.before_019(tmp_path / "gate-up", target_parameters=["mlp.experts.gate_up_proj"])
    rewrite(folder, lambda tensors: {
        name.replace(".base_layer", ""): tensor for name, tensor in tensors.items() if ".base_layer" in name
    })  # fmt: skip
    for version in (None, "0.18.2.dev0", "nightly"):
        edit_config(folder, peft_version=version)
        with pytest.raises(InvalidAdapter, match=r"lora_A.*set peft_version"):
            put(folder, bases("square"))
    for version, swapped in (("0.18.1", True), ("0.19.0", False)):
        edit_config(folder, peft_version=version)
        module = opened(folder, bases("square"))["layers.0.experts.w13"]
        a13, b13, _, _ = adapter.layers[0]
        assert torch.equal(delta(module), b13 @ a13) is swapped


def test_a_file_of_both_layouts_is_refused(bases: Callable[..., ModelSpec], tmp_path: Path) -> None:
    adapter = draw()
    folder = adapter.now(tmp_path / "now")
    old = read_tensors(adapter.before_019(tmp_path / "old"))
    rewrite(folder, lambda new: new | {name: t for name, t in old.items() if "layers.1" in name})
    with pytest.raises(InvalidAdapter, match="the other way round"):
        put(folder, bases("qwen3-moe"))


@pytest.mark.parametrize(("base", "parent"), [("qwen3-moe", "mlp"), ("mixtral", "block_sparse_moe")])
def test_pairs_for_each_expert(
    base: str, parent: str, bases: Callable[..., ModelSpec], opened: Callable[..., Weights], tmp_path: Path
) -> None:
    adapter = draw()
    check_equal(
        opened(adapter.one_by_one(tmp_path / "all", parent), bases(base)), adapter, ("w1", "w3", "w2")
    )
    some = opened(adapter.one_by_one(tmp_path / "some", parent, experts=(1, 3)), bases(base))
    check_equal(some, adapter.only((1, 3)), ("w1", "w3", "w2"))


def test_blocks_in_b_need_the_override(
    bases: Callable[..., ModelSpec], opened: Callable[..., Weights], tmp_path: Path
) -> None:
    """The file has the same shapes either way; read wrongly, experts get each other's columns."""
    adapter = draw()
    folder = adapter.in_blocks(tmp_path / "blocks")
    with pytest.raises(AssertionError):
        check_equal(opened(folder, bases("qwen3-moe")), adapter)
    edit_config(folder, **{EXPERT_ORDER: "blocks"})
    check_equal(opened(folder, bases("qwen3-moe")), adapter)
    edit_config(folder, **{EXPERT_ORDER: "whatever"})
    with pytest.raises(InvalidAdapter, match=EXPERT_ORDER):
        put(folder, bases("qwen3-moe"))


def test_scales_follow_the_parameters_own_rank(
    bases: Callable[..., ModelSpec], opened: Callable[..., Weights], tmp_path: Path
) -> None:
    """Rank-stabilised: alpha over the root of r, not of r times the experts. Patterns name parameters."""
    adapter, spec = draw(), bases("qwen3-moe")
    stabilised = opened(adapter.now(tmp_path / "stabilised", use_rslora=True), spec)
    assert stabilised["layers.0.experts.w2"].scale == float(np.float32(8 / 2**0.5))
    patterns = {"rank_pattern": {r".*\.gate_up_proj": 2}, "alpha_pattern": {r".*\.gate_up_proj": 16}}
    folder = adapter.now(tmp_path / "patterns", r=1, **patterns)
    with pytest.raises(InvalidAdapter, match=r"lora_A\.weight' has rank 2, adapter_config\.json says 1"):
        put(folder, spec)
    edit_config(folder, r=2, lora_alpha=8)
    weights = opened(folder, spec)
    assert weights["layers.0.experts.w13"].scale == 8
    assert weights["layers.0.experts.w2"].scale == 4
    assert weights.manifest.max_rank == 2
    assert weights.manifest.module_kinds == {"experts"}


def test_all_linear_has_gate_and_up_at_twice_the_rank(
    bases: Callable[..., ModelSpec], opened: Callable[..., Weights], tmp_path: Path
) -> None:
    """As PEFT stores it for a fused base, router included: r is not the highest rank."""
    wide, plain = (ExpertAdapter.draw(EXPERTS, rank, HIDDEN, 24) for rank in (2 * RANK, RANK))
    adapter = ExpertAdapter({n: (*wide.layers[n][:2], *plain.layers[n][2:]) for n in plain.layers})
    pattern = r".*\.gate_up_proj"
    folder = adapter.now(
        tmp_path / "all-linear", r=RANK, lora_alpha=8, target_modules=["q_proj"],
        target_parameters=["gate_up_proj", "down_proj", "gate.weight"],
        rank_pattern={pattern: 2 * RANK}, alpha_pattern={pattern: 16},
    )  # fmt: skip
    router = lora_pair("model.layers.0.mlp.gate", HIDDEN, EXPERTS, rank=RANK)
    query = lora_pair("model.layers.0.self_attn.q_proj", HIDDEN, HIDDEN, rank=RANK)
    rewrite(folder, lambda tensors: tensors | router | query)
    weights = opened(folder, bases("qwen3-moe"))
    check_equal(weights, adapter)
    ranks = {name: (module.rank, module.scale) for name, module in weights.items() if ".0." in name}
    assert ranks == {
        "layers.0.experts.w13": (4, 4.0),
        "layers.0.experts.w2": (2, 4.0),
        "layers.0.router": (2, 4.0),
        "layers.0.q_proj": (2, 4.0),
    }
    assert weights.manifest.max_rank == 4


@pytest.mark.parametrize("form", ["now", "before_019", "one_by_one"])
def test_what_was_pushed_comes_back(form: str, bases: Callable[..., ModelSpec], tmp_path: Path) -> None:
    folder = getattr(draw(), form)(tmp_path / form)
    store = DiskStore(tmp_path / "store")
    version = store.put(folder, "default", "x", bases("qwen3-moe"))
    assert [m.num_experts for m in version.manifest.modules] == [EXPERTS] * len(version.manifest.modules)
    store.export(Ref.parse("x", "default"), tmp_path / "back")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize(("form", "held"), [("now", 0.5), ("before_019", 2.0), ("one_by_one", 2.0)])
def test_a_recipe_rebuilds_the_pushed_file(
    form: str, held: float, bases: Callable[..., ModelSpec], opened: Callable[..., Weights], tmp_path: Path
) -> None:
    """Of today's layout from the packed tensors; the others it holds whole."""
    adapter = ExpertAdapter.draw(EXPERTS, 16, HIDDEN, 24)
    folder, spec = getattr(adapter, form)(tmp_path / form), bases("qwen3-moe")
    pushed = (folder / "adapter_model.safetensors").read_bytes()
    recipe = b"".join(recipe_pieces(read_adapter(folder, spec)))
    assert len(recipe) < held * len(pushed)
    rebuilt = io.BytesIO()
    rebuild(memoryview(recipe), opened(folder, spec), rebuilt)
    assert rebuilt.getvalue() == pushed


def _without(tensor: str) -> Callable[[Path], object]:
    return lambda folder: rewrite(folder, lambda all_: {n: t for n, t in all_.items() if n != tensor})


OTHER_NAME = "is of experts under a name that PEFT does not write"


def _with(name: str, *shape: int) -> Callable[[Path], object]:
    return lambda folder: rewrite(folder, lambda all_: all_ | {name: torch.ones(shape)})


@pytest.mark.parametrize(
    ("base", "change", "error", "text"),
    [
        ("qwen3-moe", _without(f"{PATH}.lora_B.weight"), InvalidAdapter, "no matching lora_B"),
        ("qwen3-moe", _with(f"{PATH}.lora_B.weight", 63, 8), IncompatibleAdapter, "no parameter of the base"),
        ("qwen3-moe", _with(f"{PATH}.lora_A.weight", 2, 4, 24), InvalidAdapter, "3 dimensions"),
        ("qwen3-moe", _with(f"{PATH}.lora_A.weight", 12, 24), InvalidAdapter, "its lora_A has 12"),
        ("qwen3-moe", _with(f"{PATH}.4.up_proj.lora_A.weight", 2, 64), IncompatibleAdapter, "has 4 experts"),
        ("qwen3-moe", _with(f"{PATH}.1.up_proj.lora_A.weight", 2, 64), InvalidAdapter, "no matching lora_B"),
        ("qwen3-moe", _with(f"{PATH}.1.mid_proj.lora_A.weight", 2, 64), InvalidAdapter, "matches no module"),
        ("qwen3-moe", _with(f"{INNER}.base_layer.lora_A.weight", 2, 64), InvalidAdapter, OTHER_NAME),
        ("qwen3-moe", _with(f"{PATH}.w1.lora_A.weight", 4, 2, 64), InvalidAdapter, OTHER_NAME),
        ("gpt-oss", _with(f"{PATH}.gate_up_proj.lora_A", 4, 2, 64), InvalidAdapter, OTHER_NAME),
        ("qwen3-moe", _with(f"{PATH[:-8]}.gate.weight", 4, 64), InvalidAdapter, "fully trained weight"),
        ("qwen3-moe", _with(f"{NO_LAYER}.lora_A.weight", 2, 8), IncompatibleAdapter, "layer 2"),
        ("qwen3-moe", lambda f: edit_config(f, use_dora=True), InvalidAdapter, "use_dora is true"),
        ("dense-first", lambda folder: None, IncompatibleAdapter, "layer 0 of the base has no experts"),
        ("gpt-oss", _with(f"{PATH}.1.up_proj.lora_A.weight", 2, 64), InvalidAdapter, "matches no module"),
        (
            "qwen3-moe",
            lambda folder: rewrite(folder, lambda all_: {n: t for n, t in all_.items() if "base_layer" in n}),
            InvalidAdapter,
            "belongs inside another pair",
        ),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_by_name(
    base: str,
    change: Callable[[Path], object],
    error: type[Exception],
    text: str,
    bases: Callable[..., ModelSpec],
    tmp_path: Path,
) -> None:
    """No tensor is dropped in silence."""
    folder = draw().now(tmp_path / "changed")
    change(folder)
    with pytest.raises(error, match=text):
        put(folder, bases(base))


def test_gpt_oss_has_one_layout_whatever_the_version(
    bases: Callable[..., ModelSpec], opened: Callable[..., Weights], tmp_path: Path
) -> None:
    """Its parameters are [experts, in, out], which PEFT always read right."""
    adapter = draw()
    check_equal(opened(adapter.now(tmp_path / "0.18", peft_version="0.18.1"), bases("gpt-oss")), adapter)
    with pytest.raises(IncompatibleAdapter, match="no parameter of the base"):
        put(adapter.before_019(tmp_path / "swapped"), bases("gpt-oss"))


def test_a_gate_and_up_pair_beside_one_for_both_is_refused(
    bases: Callable[..., ModelSpec], tmp_path: Path
) -> None:
    adapter = draw()
    folder = adapter.now(tmp_path / "both")
    single = read_tensors(adapter.one_by_one(tmp_path / "single"))
    rewrite(folder, lambda fused: fused | single)
    with pytest.raises(InvalidAdapter, match="mean the same thing"):
        put(folder, bases("qwen3-moe"))


def test_experts_that_disagree_are_refused(bases: Callable[..., ModelSpec], tmp_path: Path) -> None:
    folder = draw().one_by_one(tmp_path / "mixed", alpha_pattern={r"experts\.2\.up_proj": 3})
    with pytest.raises(InvalidAdapter, match=r"experts\.2\.up_proj.* another rank, scale or dtype"):
        put(folder, bases("qwen3-moe"))


def test_router_and_shared_expert(
    bases: Callable[..., ModelSpec], opened: Callable[..., Weights], tmp_path: Path
) -> None:
    tensors = {
        **lora_pair("model.layers.0.mlp.gate", 64, 4),
        **lora_pair("model.layers.1.mlp.shared_expert.down_proj", 32, 64),
        **lora_pair("model.layers.1.mlp.shared_expert_gate", 64, 1),
    }
    folder = raw_adapter(tmp_path / "shared", tensors, target_parameters=["gate.weight"])
    assert list(opened(folder, bases("qwen2-moe"))) == [
        "layers.0.router",
        "layers.1.shared_expert.down_proj",
        "layers.1.shared_expert_gate",
    ]
    with pytest.raises(InvalidAdapter, match="matches no module of the base model"):
        put(folder, bases("qwen3-moe"))


def test_the_router_under_mixtrals_and_gpt_oss_names(
    bases: Callable[..., ModelSpec], opened: Callable[..., Weights], tmp_path: Path
) -> None:
    for base, path in (("mixtral", "block_sparse_moe.gate"), ("gpt-oss", "mlp.router")):
        folder = raw_adapter(tmp_path / base, lora_pair(f"model.layers.0.{path}", 64, 4))
        assert list(opened(folder, bases(base))) == ["layers.0.router"]


def test_transposed_experts_are_called_so(bases: Callable[..., ModelSpec], tmp_path: Path) -> None:
    """Not an adapter of another rank, which they look like."""
    folder = draw().one_by_one(tmp_path / "transposed")
    rewrite(folder, lambda tensors: {name: tensor.T for name, tensor in tensors.items()})
    with pytest.raises(InvalidAdapter, match=r"lora_A\.weight' has shape .* the transpose of what PEFT"):
        put(folder, bases("qwen3-moe"))
