"""The As or the Bs of a module's experts, stacked: the orders of files, and that of the packed form."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapter_store.files.safetensors_file import NUMPY_DTYPES, TensorFile, TensorInfo


class Order(Enum):
    ROWS = "[experts * rank, width]"
    COLUMNS = "[width, rank * experts], a rank's experts side by side"
    COLUMN_BLOCKS = "[width, experts * rank], an expert's ranks side by side"
    EACH_A = "a tensor [rank, width] for each expert"
    EACH_B = "a tensor [width, rank] for each expert"


@dataclass(frozen=True)
class StackedHalf:
    """`tensors` by expert for the EACH orders, else one under 0. An expert without a tensor has zeros."""

    order: Order
    num_experts: int
    rank: int
    width: int
    tensors: Mapping[int, TensorInfo]

    @property
    def dtype(self) -> str:
        return next(iter(self.tensors.values())).dtype

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.num_experts, self.rank, self.width

    @property
    def num_bytes(self) -> int:
        return self.num_experts * self.rank * self.width * NUMPY_DTYPES[self.dtype].itemsize

    def packed(self, file: TensorFile) -> memoryview:
        """The bytes of [experts, rank, width]."""
        return np.ascontiguousarray(self._stacked(file)).reshape(-1).view(np.uint8).data

    def _stacked(self, file: TensorFile) -> NDArray[Any]:
        if self.order in (Order.EACH_A, Order.EACH_B):
            return self._one_by_one(file)
        bits, experts, rank = _bits(file, self.tensors[0]), self.num_experts, self.rank
        match self.order:
            case Order.ROWS:
                return bits.reshape(experts, rank, self.width)
            case Order.COLUMNS:
                return bits.reshape(self.width, rank, experts).transpose(2, 1, 0)
            case _:
                return bits.reshape(self.width, experts, rank).transpose(1, 2, 0)

    def _one_by_one(self, file: TensorFile) -> NDArray[Any]:
        stacked = np.zeros(self.shape, _bits(file, next(iter(self.tensors.values()))).dtype)
        for expert, tensor in self.tensors.items():
            bits = _bits(file, tensor)
            stacked[expert] = bits if self.order is Order.EACH_A else bits.T
        return stacked


@dataclass(frozen=True)
class StackedPair:
    a: StackedHalf
    b: StackedHalf

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return (*self.a.tensors.values(), *self.b.tensors.values())

    @property
    def follows_packed(self) -> bool:
        """Whether the file's tensors are the packed ones, A as it is and B with its axes reversed."""
        return self.a.order is Order.ROWS and self.b.order is Order.COLUMNS


def _bits(file: TensorFile, tensor: TensorInfo) -> NDArray[Any]:
    """The values as unsigned integers: numpy moves bfloat16 one by one."""
    bits: NDArray[Any] = file.array(tensor.name).view(f"u{NUMPY_DTYPES[tensor.dtype].itemsize}")
    return bits
