"""Starting a Triton kernel without paying for Triton's argument binding at every call."""

from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor


class Launch:
    """One kernel with everything that it was compiled for, but the sizes of the grid.

    The first call goes through Triton, which compiles; later ones start the compiled kernel directly. So all
    that Triton specialises on must be the same for each call: dtypes, alignments and strides (`signature`),
    constants and options. Interpreted kernels never compile.
    """

    def __init__(self, kernel: Any, constants: Mapping[str, object], options: Mapping[str, object]) -> None:
        self._kernel = kernel
        self._constants = dict(constants)
        self._options = dict(options)
        self._compiled: Any = None
        self._values: tuple[object, ...] = ()

    def __call__(self, grid: tuple[int, ...], *arguments: object) -> None:
        """`arguments` are the kernel's run-time arguments, in its order; constants follow them there."""
        grid = (*grid, 1, 1)[:3]
        if self._compiled is not None:
            self._compiled[grid](*arguments, *self._values)
            return
        self._compiled = self._kernel[grid](*arguments, **self._constants, **self._options)
        if self._compiled is not None:
            self._values = tuple(
                self._constants[name] for name in self._kernel.arg_names if name in self._constants
            )


def signature(*tensors: Tensor) -> Hashable:
    """What checks and specialisation depend on."""
    return tuple((t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16) for t in tensors)


def row_signature(tensor: Tensor) -> Hashable:
    """The same for a tensor of the step's rows, whatever their number."""
    return (tensor.shape[1:], tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16)
