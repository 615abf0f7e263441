import pytest

from executor.errors import StartError
from executor.gpu.memory import MemoryUse, blocks_that_fit

GIB = 1 << 30
USE = MemoryUse(total=80 * GIB, others=1 * GIB, resident=20 * GIB, peak=21 * GIB, page_in=3 * GIB)


def test_kv_blocks_take_what_is_left_of_the_share() -> None:
    """0.9 of 80 GiB, less 1 of others, 21 at the peak, 3 of an adapter and 2 kept free: 45."""
    assert USE.kv_bytes(0.9) == pytest.approx(45 * GIB)
    assert blocks_that_fit(USE, 0.9, 1 << 30, least=1) == USE.kv_bytes(0.9) // GIB


def test_too_little_is_refused_with_what_takes_the_memory() -> None:
    with pytest.raises(StartError) as refused:
        blocks_that_fit(USE, 0.25, 2 << 20, least=256)
    text = str(refused.value)
    for part in ("leaves 0 KV blocks of 2048 KiB, and 256 are needed", "20.00 GiB", "--max-loras"):
        assert part in text
