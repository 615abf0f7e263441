"""Packed files that come in parts, in any order: whole ones are right, and no byte may be another one."""

import io
import random
from pathlib import Path

import pytest

from adapter_store import DataLoss, DiskStore, Manifest, ModelSpec
from adapter_store.packed.arriving import ArrivingWeights

ROUNDS = 60


@pytest.fixture
def packed(adapters: list[Path], spec: ModelSpec, tmp_path: Path) -> tuple[Manifest, bytes]:
    store, file = DiskStore(tmp_path / "store"), io.BytesIO()
    with store.open(store.put(adapters[0], "acme", "x", spec).digest) as weights:
        weights.write_to(file)
        return weights.manifest, file.getvalue()


def bring(content: bytes, manifest: Manifest, chance: random.Random) -> None:
    """As readers of chunks of a random size would, and opened."""
    arriving = ArrivingWeights(memoryview(content), manifest)
    size = chance.choice([7, 100, 1000, 1 << 30])
    starts = list(range(0, len(content), size))
    chance.shuffle(starts)
    for start in starts:
        arriving.arrived(start, min(start + size, len(content)))
    with arriving.finish() as weights:
        assert weights.manifest == manifest
        assert {name: module.rank for name, module in weights.items()} == {
            module.name: module.rank for module in manifest.modules
        }


def test_parts_in_any_order(packed: tuple[Manifest, bytes]) -> None:
    manifest, content = packed
    for number in range(ROUNDS):
        bring(content, manifest, random.Random(number))


def test_no_byte_may_be_another_one(packed: tuple[Manifest, bytes]) -> None:
    manifest, content = packed
    for number in range(ROUNDS):
        chance = random.Random(number)
        position = number * (len(content) - 1) // (ROUNDS - 1)
        damaged = bytearray(content)
        damaged[position] ^= 1 << number % 8
        with pytest.raises(DataLoss):
            bring(bytes(damaged), manifest, chance)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 60, -1])
def test_a_file_that_is_cut_short(packed: tuple[Manifest, bytes], length: int) -> None:
    manifest, content = packed
    with pytest.raises(DataLoss):
        bring(content[:length], manifest, random.Random(0))
