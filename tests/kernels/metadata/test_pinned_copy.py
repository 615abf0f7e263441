"""Copies from pinned memory, by the driver's calls and by torch's."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernels.metadata.pinned_copy import PinnedCopy, load_driver

SIZE = 40_000
BOTH_WAYS = pytest.mark.parametrize("by_driver", [True, False], ids=["driver", "torch"])
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("name", ["libno-such-driver.so", "libm.so.6"])
def test_without_nvidias_driver_there_is_none(name: str) -> None:
    assert load_driver(name) is None


def copy_to(target: torch.Tensor, by_driver: bool) -> PinnedCopy:
    driver = load_driver() if by_driver else None
    assert isinstance(driver, ctypes.PyDLL) == by_driver
    return PinnedCopy(target, driver)


@pytest.mark.gpu
@NEEDS_GPU
@BOTH_WAYS
def test_an_array_is_filled_again_only_when_its_bytes_have_left(by_driver: bool) -> None:
    target = torch.zeros(SIZE, dtype=torch.int32, device="cuda")
    copies = [copy_to(target, by_driver) for _ in range(2)]
    seen = []
    for step in range(50):
        copy = copies[step % 2]
        copy.wait()
        copy.array.fill(step)
        torch.cuda._sleep(1_000_000)  # the device is behind the host
        copy.send(SIZE)
        seen.append(target.clone())
    for step, found in enumerate(seen):
        assert bool((found == step).all()), step


@pytest.mark.gpu
@NEEDS_GPU
@BOTH_WAYS
def test_a_copy_is_in_the_current_streams_order(by_driver: bool) -> None:
    target = torch.zeros(SIZE, dtype=torch.int32, device="cuda")
    copy, side = copy_to(target, by_driver), torch.cuda.Stream()
    copy.array.fill(3)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        target.fill_(7)
        copy.send(SIZE)
    copy.wait()
    assert bool((target == 3).all())


@pytest.mark.gpu
@NEEDS_GPU
@BOTH_WAYS
def test_memory_of_one_that_is_gone_is_nobody_elses_before_its_bytes_have_left(by_driver: bool) -> None:
    target = torch.zeros(SIZE, dtype=torch.int32, device="cuda")
    copy = copy_to(target, by_driver)
    copy.array.fill(3)
    torch.cuda._sleep(100_000_000)
    copy.send(SIZE)
    del copy
    others = [torch.full((SIZE,), 7, dtype=torch.int32, pin_memory=True) for _ in range(4)]
    assert bool((target == 3).all()), len(others)


@pytest.mark.gpu
@NEEDS_GPU
@BOTH_WAYS
def test_a_thread_that_never_used_the_device_can_send(by_driver: bool) -> None:
    target = torch.zeros(SIZE, dtype=torch.int32, device="cuda")
    copy = copy_to(target, by_driver)
    copy.array.fill(3)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(copy.send, SIZE).result()
        pool.submit(copy.wait).result()
        copy.array.fill(4)
        pool.submit(copy.send, SIZE).result()
    torch.cuda.synchronize()
    assert bool((target == 4).all())
