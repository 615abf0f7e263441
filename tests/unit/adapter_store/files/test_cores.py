"""Work on all cores, and what is read and hashed by it."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from adapter_store.files import memory
from adapter_store.files.cores import on_all_cores


def test_results_come_in_the_order_of_the_items() -> None:
    assert on_all_cores(lambda number: number * number, range(1000)) == [n * n for n in range(1000)]
    assert on_all_cores(str, []) == []


def test_a_failure_is_raised() -> None:
    def work(number: int) -> None:
        if number == 37:
            raise ValueError("thirty-seven")

    with pytest.raises(ValueError, match="thirty-seven"):
        on_all_cores(work, range(100))


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 10_001])
def test_a_file_is_read_whole_whatever_the_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    monkeypatch.setattr(memory, "_SPAN_BYTES", 4096)
    content = np.random.default_rng(num_bytes).bytes(num_bytes)
    (tmp_path / "file").write_bytes(content)
    found = memory.read_file(tmp_path / "file")
    assert hashlib.sha256(found).digest() == hashlib.sha256(content).digest()
