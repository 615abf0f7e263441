"""Steps and ranks as they may come, to see whether what was prepared for them is complete."""

import random
from collections.abc import Iterator

from kernels.punica import PunicaWrapperBase


def random_runs(rng: random.Random, slots: int, rows: int, least: int) -> Iterator[list[tuple[int, int]]]:
    """Steps of `least` to `rows` rows: some adapters, evenly or not, and rows without one."""
    while True:
        total = rng.choice((rng.randint(least, rows), least, rows))
        own = rng.randint(1, rng.choice((total, min(total, 600), min(total, 64))))
        active = min(own, rng.choice((1, 2, 3, slots, rng.randint(1, slots))), slots)
        cuts = [own * number // active for number in range(1, active)]
        if rng.random() < 0.5:
            cuts = sorted(rng.sample(range(1, own), active - 1))
        ends = zip([0, *cuts], [*cuts, own], strict=True)
        lengths = [end - start for start, end in ends]
        yield [*zip(rng.sample(range(slots), active), lengths, strict=True), (-1, total - own)]


def random_ranks(rng: random.Random, punica: PunicaWrapperBase, max_rank: int) -> None:
    classes = rng.choice([[8], [16], [32], [64], [8, max_rank], [8, 8, 8, max_rank], [4, 16, 32, 64]])
    for slot in range(punica.max_loras):
        punica.set_slot_rank(slot, min(max_rank, rng.choice(classes)))
