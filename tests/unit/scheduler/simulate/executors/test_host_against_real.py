"""The simulated host memory keeps what the real one keeps, on random loads and page-ins."""

from dataclasses import dataclass
from random import Random

import pytest

from executor.adapters import host_tier
from executor.adapters.host_tier import HostTier
from scheduler.simulate.executors import tiers
from scheduler.simulate.executors.tiers import Host


@dataclass(frozen=True)
class Image:
    nbytes: int
    num_full_heads: int = 0


@pytest.mark.parametrize("remembered", [10, 4096])
def test_the_same_images_stay(remembered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when counts of images that are there are forgotten, and when requests are expected."""
    monkeypatch.setattr(host_tier, "_MAX_REMEMBERED", remembered)
    monkeypatch.setattr(tiers, "MAX_REMEMBERED", remembered)
    rng = Random(remembered)
    sizes = {f"adapter-{number}": rng.choice([8, 16, 17, 32]) for number in range(40)}
    real, model = HostTier[Image](300, 32), Host(300, 32, sizes)
    refused = 0
    for now in range(3000):
        digest = rng.choice(list(sizes)[: rng.choice([10, 40])])
        for host in (real, model):
            host.lapse(now)
        if rng.random() < 0.3:
            uses, until = rng.choice([1, 5, 100]), now + rng.randint(0, 60)
            for host in (real, model):
                host.expect(digest, uses, until)
        if digest in real:
            real.use(digest)
            model.use(digest)
            continue
        keep = set(rng.sample(list(sizes), rng.choice([0, 3, 36])))
        fits = real.put(digest, Image(sizes[digest]), keep)
        assert model.put(digest, keep) == fits
        refused += not fits
        real.check()
        assert set(model) == set(real) and model.num_bytes == real.num_bytes
    assert refused
