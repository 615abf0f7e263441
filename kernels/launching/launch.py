"""Starts a Triton kernel without paying for Triton's argument binding at every call."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor
from triton.runtime import driver


class Launch:
    """One kernel with everything that it was compiled for, but the sizes of the grid.

    The first call goes through Triton, which compiles; later ones start the compiled kernel directly, on the
    current stream of that call's device. So all that Triton specialises on must be the same for each call:
    dtypes, alignments and strides (`signature`), constants and options. Triton's launch hooks, which
    profilers of its own set, see only the first call. Interpreted kernels never compile.
    """

    def __init__(self, kernel: Any, constants: Mapping[str, object], options: Mapping[str, object]) -> None:
        self._kernel = kernel
        self._constants = dict(constants)
        self._options = dict(options)
        self._start: Any = None
        self._compiled: tuple[object, ...] = ()
        self._device = 0
        self._values: tuple[object, ...] = ()

    def __call__(self, grid: tuple[int, ...], *arguments: object) -> None:
        """`arguments` are the kernel's run-time arguments, in its order; constants follow them there."""
        if self._start is None:
            self._first(grid, arguments)
            return
        # As numbers: for a tensor Triton asks the driver whether its address is one of the device's.
        passed = [value.data_ptr() if type(value) is Tensor else value for value in arguments]
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(self._device)
        self._start(x, y, z, stream, *self._compiled, *passed, *self._values)

    def bound(self, kept: Sequence[Tensor], numbers: Sequence[int]) -> Callable[..., None] | None:
        """The call (grid, num_rows, *addresses), which costs the host least, for a kernel whose run-time
        arguments are tensors of the call, those that are `kept`, num_rows and `numbers`. The grid has three
        sizes, none of them 0.

        None before the first call of this Launch, and where kernels are interpreted. It knows `kept` by their
        addresses: whoever calls it makes sure that they are still there.
        """
        if self._start is None:
            return None
        start, compiled, device = self._start, self._compiled, self._device
        stream_of = driver.active.get_current_stream
        known, last = [tensor.data_ptr() for tensor in kept], (*numbers, *self._values)

        def launch(grid: tuple[int, int, int], num_rows: int, *addresses: int) -> None:
            start(*grid, stream_of(device), *compiled, *addresses, *known, num_rows, *last)

        return launch

    def _first(self, grid: tuple[int, ...], arguments: tuple[object, ...]) -> None:
        compiled = self._kernel[(*grid, 1, 1)[:3]](*arguments, **self._constants, **self._options)
        if compiled is None:
            return
        self._compiled = (compiled.function, compiled.packed_metadata, None, None, None)  # no launch hooks
        self._device = driver.active.get_current_device()
        names = self._kernel.arg_names
        self._values = tuple(self._constants[name] for name in names if name in self._constants)
        self._start = compiled.run  # last: another thread may take the short way from here on


def signature(*tensors: Tensor) -> Hashable:
    """What checks and specialisation depend on."""
    return tuple((t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16) for t in tensors)


def row_signature(tensor: Tensor) -> Hashable:
    """The same for a tensor of the step's rows, whatever their number."""
    return (tensor.shape[1:], tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16)
