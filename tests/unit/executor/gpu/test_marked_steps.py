"""Steps with DoRA's factors and with tables of their own are captured too, beside all others, on the CPU."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from adapter_store.module_names import DENSE_PROJECTIONS
from executor.gpu import graphed_pass as graphed_forward
from executor.gpu.cuda_graphs import Captured
from executor.lora.dora import DoRAFactors
from executor.lora.full_heads import FullHeads
from executor.lora.slot_marks import SlotMarks
from executor.models import CausalLM
from executor.step.inputs import SequenceRows
from kernels.punica import PunicaWrapperBase
from tests.support.adapters.tiny_models import save_variant
from tests.support.engines.gpu_steps import BufferStep
from tests.unit.executor.gpu.test_graphed_pass import MAX_LORAS, Pair

VOCAB = 128


class Chosen(dict[Any, Captured]):
    """The captured steps; remembers which was asked for last. What the host has marked since the capture
    means nothing to a replay, as on a GPU, where nothing of the host runs again."""

    last: Any = None

    def __getitem__(self, key: Any) -> Captured:
        self.last = key
        captured = super().__getitem__(key)

        def replay() -> None:
            with pytest.MonkeyPatch.context() as frozen:
                frozen.setattr(SlotMarks, "concern", lambda marks, meta: marks._all)
                captured.replay()

        return Captured((replay,), captured.out)


class MarkedPair(Pair):
    def __init__(self, folder: str) -> None:
        self.dora: list[DoRAFactors] = []
        self.heads: list[FullHeads] = []
        super().__init__(folder, frozenset(DENSE_PROJECTIONS), self._attach)
        for slot in range(MAX_LORAS):
            self.load(slot, 1 + slot % 16, seed=slot)
        self.graphed.warm_up()
        self.graphs = self.graphed._graphs = Chosen(self.graphed._graphs)

    def _attach(self, model: CausalLM, punica: PunicaWrapperBase) -> tuple[SlotMarks, ...]:
        self.dora.append(DoRAFactors(model, MAX_LORAS))
        self.heads.append(FullHeads(model, 3, punica))
        return self.dora[-1].marks, self.heads[-1].tables

    def mark(self, slot: int, seed: int | None, *heads: str) -> None:
        """What the slot's adapter has from now on: factors, drawn by `seed`, and matrices of its own."""
        draw = torch.Generator().manual_seed(seed or 0)
        factors = None if seed is None else torch.rand(self.dora[0].nbytes // 4, generator=draw) + 0.5
        matrices = {name: torch.randn(self.heads[0].shape, generator=draw) for name in heads}
        for dora, full_heads in zip(self.dora, self.heads, strict=True):
            for target, source in [*dora.enter(slot, factors), *full_heads.enter(slot, matrices)]:
                target.copy_(source)

    def check_form(self, sequences: Sequence[SequenceRows], *, marked: bool) -> None:
        self.graphs.last = None
        self.check(sequences)
        assert self.graphs.last.marked == marked


@pytest.fixture(params=["llama-biases", "qwen3"])
def pair(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MarkedPair:
    monkeypatch.setattr(graphed_forward, "DecodeStep", BufferStep)
    return MarkedPair(save_variant(request.param, tmp_path / "model"))


def prompts(slots: Sequence[int], count: int = 3) -> list[SequenceRows]:
    rng = random.Random(len(slots))
    return [
        SequenceRows([rng.randrange(VOCAB) for _ in range(count)], 0, [number], slot, (count - 1,))
        for number, slot in enumerate(slots)
    ]


def decodes(slots: Sequence[int]) -> list[SequenceRows]:
    return [SequenceRows([5 + number], 3, [number], slot, (0,)) for number, slot in enumerate(slots)]


def test_mixtures_of_adapters_with_and_without(pair: MarkedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other slots, factors and tables than at capture, when there were none; what left a slot is gone."""
    pair.check(prompts([n % MAX_LORAS for n in range(20)]))  # 60 rows: not captured
    monkeypatch.setattr(pair.graphed, "_eager", lambda *_: pytest.fail("not captured"))
    pair.check_form(decodes([0, 1, 2, -1]), marked=False)
    pair.mark(1, 7)
    pair.check_form(decodes([0, 1, 2, -1]), marked=True)
    pair.check_form(decodes([1]), marked=True)
    pair.check_form([*decodes([0, 3, 1]), *prompts([2] * 8, 2)[3:]], marked=True)
    pair.check_form(decodes([0, 2, 3, -1]), marked=False)  # nobody else pays for it
    pair.check_form(decodes([-1] * 9), marked=False)
    pair.mark(2, None, "embed_tokens", "lm_head")
    pair.mark(3, 8, "embed_tokens")
    pair.check_form(decodes([n % 5 - 1 for n in range(20)]), marked=True)
    pair.check_form(prompts([2, 3, -1, 1]), marked=True)
    pair.mark(3, None)  # another adapter, without factors and table; slot 1 still has some
    pair.mark(2, None, "lm_head")
    pair.check_form(decodes([3, 1, 2, 0]), marked=True)
    pair.check_form(decodes([3, 2]), marked=False)  # a head comes after the captured part
    pair.mark(1, 9, "embed_tokens")  # other factors
    pair.check_form(decodes([1, 0, 1]), marked=True)


def test_each_family_is_captured_once_for_each_size(pair: MarkedPair) -> None:
    keys = list(pair.graphs)
    marked = [(key.rows, key.decode, key.plan) for key in keys if key.marked]
    plain = {(key.rows, key.decode, key.plan) for key in keys if key.plan and not key.marked}
    assert plain.issuperset(marked)
    sizes = {(key.rows, key.decode) for key in keys}
    assert sorted((rows, decode) for rows, decode, _ in marked) == sorted(sizes)
    assert len(keys) == len(set(keys)) == len(plain) + 2 * len(sizes)


def test_who_has_no_marks_captures_no_third_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed_forward, "DecodeStep", BufferStep)
    pair = Pair(save_variant("llama", tmp_path / "model"), frozenset(DENSE_PROJECTIONS))
    pair.graphed.warm_up()
    assert not any(key.marked for key in pair.graphed._graphs)
