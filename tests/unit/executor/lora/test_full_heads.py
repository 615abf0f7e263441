"""Whole matrices in places of their own. That answers equal PEFT's is in tests/fidelity."""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from adapter_store import DiskStore, ModelSpec
from executor.adapters.host_pool import HostPool
from executor.adapters.pooled import PooledAdapters, PooledImage
from executor.adapters.slot_writer import WriterInTurn
from executor.lora.config import LoRAConfig
from executor.lora.dora import DoRAFactors
from executor.lora.errors import FullHeadNotServed, ModuleShapeMismatch, NonFiniteWeights
from executor.lora.full_heads import FullHeads, check_full_heads
from executor.lora.replace import attach_lora
from executor.models import CausalLM, load_model
from kernels.metadata.meta import LoRAMapping
from kernels.punica import PunicaWrapperCPU
from tests.support.adapters.peft import make_adapter, make_base, read_tensors, rewrite

SLOTS, VOCAB, HIDDEN = 3, 128, 64
HEAD = "base_model.model.lm_head.weight"


class Rig:
    def __init__(self, folder: Path, places: int, dtype: torch.dtype = torch.float32) -> None:
        self.model: CausalLM = load_model(folder, dtype, "cpu")
        self.punica = PunicaWrapperCPU(SLOTS, 8)
        self.arena = attach_lora(self.model, LoRAConfig(SLOTS, 4, dtype=dtype), self.punica).arena
        self.dora = DoRAFactors(self.model, SLOTS)
        self.full = FullHeads(self.model, places, self.punica)

    def enter(self, slot: int, **matrices: torch.Tensor) -> None:
        for target, source in self.full.enter(slot, matrices):
            target.copy_(source)

    def run(self, *runs: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(embedded tokens, logits of random rows) of one step."""
        self.punica.update_metadata(LoRAMapping(runs, runs))
        count = sum(rows for _, rows in runs)
        hidden = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            return self.model.model.embed_tokens(torch.arange(count) + 5), self.model.head(hidden)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("model"), tied=True)


def matrix(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(seed))


def test_each_row_has_its_own_slots_matrices(base: Path) -> None:
    rig = Rig(base, places=3)
    table, logits = rig.run((-1, 6))
    rig.enter(0, lm_head=matrix(1))
    rig.enter(2, lm_head=matrix(2), embed_tokens=matrix(3))
    hidden = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1))
    mixed_table, mixed = rig.run((0, 1), (2, 2), (-1, 1), (0, 1), (1, 1))  # slot 0 not in one piece
    for rows, head in (([0, 4], matrix(1)), ([1, 2], matrix(2))):
        torch.testing.assert_close(mixed[rows], hidden[rows] @ head.T)
    assert torch.equal(mixed[[3, 5]], logits[[3, 5]])
    assert torch.equal(mixed_table[[1, 2]], matrix(3)[[6, 7]])
    assert torch.equal(mixed_table[[0, 3, 4, 5]], table[[0, 3, 4, 5]])  # a tied base's head is the slot's own


def test_own_heads_are_capped_and_scaled_as_the_bases(base: Path) -> None:
    rig = Rig(base, places=1)
    logits = rig.run((-1, 2), (0, 2))[1]
    heads = rig.model.logits_processor
    heads.base_layer.soft_cap, heads.base_layer.scale = 3.0, 0.5
    rig.enter(0, lm_head=matrix(1))
    hidden = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(1))
    expected = 0.5 * 3.0 * torch.tanh(torch.cat([logits[:2], hidden[2:] @ matrix(1).T]) / 3.0)
    torch.testing.assert_close(rig.run((-1, 2), (0, 2))[1], expected)


def test_nothing_stays_of_who_left(base: Path) -> None:
    rig = Rig(base, places=2)
    expected = rig.run((0, 4))
    rig.enter(0, lm_head=matrix(1), embed_tokens=matrix(2))
    rig.enter(0)
    for got, wanted in zip(rig.run((0, 4)), expected, strict=True):
        assert torch.equal(got, wanted)
    rig.enter(0, lm_head=matrix(1), embed_tokens=matrix(2))
    with pytest.raises(RuntimeError, match="slot 1 needs 1 full heads, 0 are free"):
        rig.full.enter(1, {"lm_head": matrix(3)})
    rig.full.clear(0)
    rig.enter(1, lm_head=matrix(3))
    assert torch.equal(rig.run((0, 4))[1], expected[1]) and set(rig.full.heads) == {1}


def test_a_step_with_tables_reads_none_of_a_slot_that_was_emptied(base: Path) -> None:
    rig = Rig(base, places=2)
    table, _ = rig.run((-1, 4))
    rig.enter(0, embed_tokens=matrix(1))
    for target, source in rig.full.clear(0):
        target.copy_(source)
    rig.enter(2, embed_tokens=matrix(2))
    mixed, _ = rig.run((0, 2), (2, 1), (-1, 1))
    assert torch.equal(mixed[[0, 1, 3]], table[[0, 1, 3]]) and torch.equal(mixed[2], matrix(2)[7])


@pytest.fixture
def put(base: Path, tmp_path: Path) -> Callable[..., tuple[DiskStore, str]]:
    def run(scale: float = 1.0, **options: object) -> tuple[DiskStore, str]:
        folder = make_adapter(tmp_path / "a", base, seed=1, targets=["q_proj"], use_dora=True, **options)  # type: ignore[arg-type]
        if HEAD in read_tensors(folder):
            rewrite(folder, lambda tensors: tensors | {HEAD: tensors[HEAD] * scale})
        store = DiskStore(tmp_path / "store")
        return store, store.put(folder, "acme", "x", ModelSpec.from_folder(base)).digest

    return run


def load(adapters: PooledAdapters, digest: str, pool: HostPool) -> PooledImage:
    outcomes: list[object] = []

    def run() -> None:
        try:
            outcomes.append(adapters.load_image(digest))
        except Exception as error:
            outcomes.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        pool.serve((digest,), lambda: False)
        thread.join(0.001)
    [outcome] = outcomes
    if isinstance(outcome, Exception):
        raise outcome
    assert isinstance(outcome, PooledImage)
    return outcome


def pooled(rig: Rig, store: DiskStore) -> tuple[PooledAdapters, HostPool]:
    pool = HostPool(1 << 20, 1 << 18, lambda: None, torch.device("cpu"))
    writer = WriterInTurn(rig.arena, rig.punica)
    return PooledAdapters(store, rig.arena.layout, pool, writer, rig.dora, rig.full), pool


def test_one_region_holds_all_that_an_adapter_has(base: Path, put: Callable[..., object]) -> None:
    rig = Rig(base, places=2, dtype=torch.bfloat16)
    store, digest = put(modules_to_save=["lm_head", "embed_tokens"])  # type: ignore[misc]
    adapters, pool = pooled(rig, store)
    image = load(adapters, digest, pool)
    assert image.num_full_heads == 2
    assert 2 * VOCAB * HIDDEN * 2 < image.nbytes <= adapters.nbytes_per_slot
    plain = rig.arena.nbytes_per_slot + rig.dora.nbytes
    assert [adapters.slot_nbytes(heads) - plain for heads in (0, 2)] == [0, 2 * VOCAB * HIDDEN * 2]
    adapters.load(1, image)
    table = rig.full._places[rig.full.tables.on_device[1]]
    with store.open(digest) as weights:
        for name, held in (("lm_head", rig.full.heads[1]), ("embed_tokens", table)):
            assert torch.equal(held, torch.from_numpy(np.array(weights.full_heads[name])).bfloat16())
    assert rig.dora.marks.slots == {1}
    pool.check([image.region])
    adapters.clear(1)
    assert not rig.full.heads and not rig.full.tables.slots and not rig.dora.marks.slots
    adapters.forget(image)
    pool.check([])


def test_what_does_not_fit_is_refused_by_name(base: Path, put: Callable[..., object], tmp_path: Path) -> None:
    store, digest = put(scale=1e6, modules_to_save=["lm_head", "embed_tokens"])  # type: ignore[misc]
    few = pooled(Rig(base, places=1), store)
    with pytest.raises(FullHeadNotServed, match=r"embed_tokens and lm_head .* 1 such .*--max-full-heads"):
        load(few[0], digest, few[1])
    narrow = pooled(Rig(base, places=2, dtype=torch.float16), store)
    with pytest.raises(NonFiniteWeights, match=r"lm_head\.weight"):
        load(narrow[0], digest, narrow[1])
    for pool in (few[1], narrow[1]):
        pool.check([])
    wider = make_base(tmp_path / "wider", vocab_size=136)
    with store.open(digest) as weights:
        check_full_heads(weights, Rig(base, places=2).full)
        with pytest.raises(FullHeadNotServed):
            check_full_heads(weights, None)
        with pytest.raises(ModuleShapeMismatch, match=r"embed_tokens\.weight .* \[136, 64\]"):
            check_full_heads(weights, Rig(wider, places=2).full)
