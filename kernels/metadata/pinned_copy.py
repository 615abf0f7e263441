"""A pinned host buffer and its copies to the device, by calls of the CUDA driver itself.

Torch's take three times as long (its dispatcher, an object for the stream), and each lets other threads have
the interpreter, which the step then waits for.
"""

import ctypes
import weakref
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ARGUMENTS = {
    "cuMemcpyHtoDAsync_v2": (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p),
    "cuEventRecord": (ctypes.c_void_p, ctypes.c_void_p),
    "cuEventQuery": (ctypes.c_void_p,),
}


@lru_cache
def load_driver(name: str = "libcuda.so.1") -> ctypes.PyDLL | None:
    """NVIDIA's driver, with what is called here declared; None where there is none."""
    try:
        driver = ctypes.PyDLL(name)
        for function, arguments in _ARGUMENTS.items():
            getattr(driver, function).argtypes = arguments
    except (OSError, AttributeError):
        return None
    return driver


class PinnedCopy:
    """The host side of `target`, int32 [elements] on a device: fill `array`, then `send`; `wait` before the
    next filling.

    Both are to be called with the target's device as the current one, as launches of kernels are.
    """

    def __init__(self, target: Tensor, driver: ctypes.PyDLL | None) -> None:
        self._target, self._host = target, torch.zeros_like(target, device="cpu", pin_memory=True)
        self.array: npt.NDArray[np.int32] = self._host.numpy()
        self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.device(target.device):
            self._sent.record()  # which makes the driver's event
        self._driver, self._event, self._device = driver, self._sent.cuda_event, target.get_device()
        self._addresses = target.data_ptr(), self._host.data_ptr()
        # Torch's allocator of pinned memory knows of torch's copies alone: it would give the memory to others
        # while the driver still reads it.
        weakref.finalize(self, self._sent.synchronize).atexit = False

    def wait(self) -> None:
        """Until the last `send` is done: its bytes have left the array."""
        if self._driver is None or self._driver.cuEventQuery(self._event) != 0:
            self._sent.synchronize()

    def send(self, count: int) -> None:
        """Copy the array's first `count` elements to the device, in the current stream's order."""
        if not self._sent_by_driver(count * self.array.itemsize):
            # Torch binds a new thread to the device, and says what is wrong where something is.
            self._target[:count].copy_(self._host[:count], non_blocking=True)
            self._sent.record()

    def _sent_by_driver(self, size: int) -> bool:
        driver = self._driver
        # Without a number the default stream is the current device's.
        if driver is None or torch._C._cuda_getDevice() != self._device:
            return False
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        failed: int = driver.cuMemcpyHtoDAsync_v2(*self._addresses, size, stream) or driver.cuEventRecord(
            self._event, stream
        )
        return failed == 0
