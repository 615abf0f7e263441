"""DoRA's factors and tables of their own on a GPU: captured, beside other steps, which stay as they were."""

import json
from pathlib import Path

import pytest
import torch

from executor.lora.dora import DoRAFactors
from executor.lora.full_heads import FullHeads
from tests.support.engines.compilations import compilations
from tests.unit.executor.gpu.test_graphed_pass_gpu import MODEL, SEQUENCES, SLOTS, Served, Traffic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MARKED, PLACES = (2, 5), 2


class MarkedServed(Served):
    def __init__(self, folder: Path, **settings: object) -> None:
        super().__init__(folder, max_full_heads=PLACES, **settings)
        plain = (self.exact, self.rounded)
        on_gpu = self.shard.slots
        assert on_gpu.dora is not None and on_gpu.full_heads is not None
        self.dora = [*(DoRAFactors(each.model, SLOTS) for each in plain), on_gpu.dora]
        self.heads = [*(FullHeads(each.model, PLACES, each.punica) for each in plain), on_gpu.full_heads]

    def mark(self, slot: int, seed: int | None, *heads: str) -> None:
        """What the slot's adapter has from now on: factors, drawn by `seed`, and matrices of its own."""
        draw = torch.Generator().manual_seed(seed or 0)
        factors = None if seed is None else torch.rand(self.dora[0].nbytes // 4, generator=draw) + 0.5
        matrices = {name: torch.randn(self.heads[0].shape, generator=draw) * 0.02 for name in heads}
        for dora, full_heads in zip(self.dora, self.heads, strict=True):
            for target, source in [*dora.enter(slot, factors), *full_heads.enter(slot, matrices)]:
                target.copy_(source)
        torch.cuda.synchronize()


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MarkedServed:
    folder = tmp_path_factory.mktemp("dummy")
    (folder / "config.json").write_text(json.dumps(MODEL | {"attention_bias": True}))
    served = MarkedServed(folder, dtype=request.param)
    for slot in range(SLOTS):
        served.load(slot, 1 + slot % 16, seed=slot)
    for slot in MARKED:
        served.mark(slot, slot)
    return served


def test_steps_of_every_size_with_and_without_marks(
    served: MarkedServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At capture no slot had anything. Then ranks, factors and tables change between steps."""
    traffic = Traffic(5)
    rows, slots = traffic.rows, traffic.slots
    with compilations() as compiled:
        slots[:] = [n % SLOTS for n in range(SEQUENCES)]
        served.check([rows(n, 17) for n in range(40)])  # too many rows to be captured
        monkeypatch.setattr(served.shard.forward_pass, "_eager", lambda *_: pytest.fail("not captured"))
        served.check([rows(n, 1) for n in range(30)] + [rows(n, 9) for n in range(30, 40)])
        for active in (1, 2, 8, 24, 40):
            served.check([rows(n, 1) for n in traffic.some(active)])
        for number, pattern in enumerate((MARKED, (5,), (-1, 2), range(SLOTS))):
            slots[:] = [pattern[n % len(pattern)] for n in range(SEQUENCES)]
            served.load(MARKED[0], 16 - number, seed=300 + number)
            served.mark(MARKED[0], 30 + number)
            for count in (1, 7, 40):
                served.check([rows(n, 1) for n in range(count)])
            served.check([rows(n, 1) for n in range(20)] + [rows(39, 4)])
        served.mark(3, None, "embed_tokens", "lm_head")
        served.check([rows(n, 1) for n in range(40)])
        served.mark(3, None)
        served.mark(MARKED[1], None)  # gone, while the other one still has some
        served.mark(MARKED[0], 40, "embed_tokens")
        served.check([rows(n, 1) for n in range(40)])
        for pattern in ((3, 5, -1), (-1,), (3, 2, 5)):
            slots[:] = [pattern[n % len(pattern)] for n in range(SEQUENCES)]
            served.check([rows(n, 1) for n in range(40)])
            served.check([rows(n, 3) for n in range(40)])
    assert not compiled
    served.check_all()


def test_a_captured_step_is_the_same_layer_by_layer(served: MarkedServed) -> None:
    forward_pass, traffic = served.shard.forward_pass, Traffic(6)
    served.mark(MARKED[0], 50, "embed_tokens")
    served.mark(MARKED[1], 51)
    forward_pass.run([traffic.rows(n, 17) for n in range(40)])
    for step in ([MARKED[0]], list(range(SLOTS)), [MARKED[1]] * 40):
        traffic.slots[: len(step)] = step
        sequences = [traffic.rows(n, 1) for n in range(len(step))]
        captured = forward_pass.run(sequences).clone()
        with torch.inference_mode():
            eager = forward_pass._eager(sequences, None)  # type: ignore[attr-defined]
        assert (captured - eager).norm() < (1e-4 if served.dtype == torch.float32 else 4e-2) * eager.norm()


def test_equal_steps_with_factors_give_equal_bits(served: MarkedServed) -> None:
    forward_pass, steps = served.shard.forward_pass, []
    for _ in range(2):
        traffic = Traffic(2)
        forward_pass.run([traffic.rows(n, 17) for n in range(40)])
        steps.append([forward_pass.run([traffic.rows(n, 1) for n in range(40)]).clone() for _ in range(3)])
    assert all(torch.equal(one, other) for one, other in zip(*steps, strict=True))
