"""DoRA's factors on a GPU: their steps run layer by layer, all others are captured and stay as they were."""

import json
from pathlib import Path

import pytest
import torch

from executor.lora.dora import DoRAFactors
from tests.support.compilations import compilations
from tests.unit.executor.test_graphed_gpu import MODEL, SEQUENCES, SLOTS, Served, Traffic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DORA = (2, 5)  # slots


class ServedWithFactors(Served):
    def __init__(self, folder: Path, **settings: object) -> None:
        super().__init__(folder, **settings)
        plain = [DoRAFactors(each.model, SLOTS) for each in (self.exact, self.rounded)]
        on_gpu = self.shard.slots.dora
        assert on_gpu is not None
        self.dora = [*plain, on_gpu]

    def give_factors(self, slot: int, seed: int) -> None:
        values = torch.rand(self.dora[0].nbytes // 4, generator=torch.Generator().manual_seed(seed)) + 0.5
        for each in self.dora:
            for target, source in each.enter(slot, values):
                target.copy_(source)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ServedWithFactors:
    folder = tmp_path_factory.mktemp("dummy")
    (folder / "config.json").write_text(json.dumps(MODEL))
    served = ServedWithFactors(folder, dtype=request.param)
    for slot in range(SLOTS):
        served.load(slot, 1 + slot % 16, seed=slot)
    for slot in DORA:
        served.give_factors(slot, seed=slot)
    return served


def test_steps_of_every_size_with_and_without_factors(
    served: ServedWithFactors, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic = Traffic(5)
    rows, slots = traffic.rows, traffic.slots
    forward_pass = served.shard.forward_pass
    with compilations() as compiled:
        slots[:] = [n % SLOTS for n in range(SEQUENCES)]
        served.check([rows(n, 17) for n in range(40)])
        served.check([rows(n, 1) for n in range(30)] + [rows(n, 9) for n in range(30, 40)])
        for active in (1, 2, 8, 24, 40):
            served.check([rows(n, 1) for n in traffic.some(active)])
        slots[:] = [DORA[n % 2] for n in range(SEQUENCES)]
        served.check([rows(0, 1)])
        served.check([rows(n, 1) for n in range(40)])
        slots[:] = [n % 2 - 1 for n in range(SEQUENCES)]  # neither of them: captured, as ever
        monkeypatch.setattr(forward_pass, "_eager", lambda *_: pytest.fail("not captured"))
        served.check([rows(n, 1) for n in range(40)])
    assert not compiled
    served.check_all()
