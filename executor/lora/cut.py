"""Which part of a module's A and B one rank holds."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

Array = TypeVar("Array", Tensor, npt.NDArray[np.generic])


@dataclass(frozen=True, slots=True)
class Cut:
    """The default is everything.

    a_columns  input columns of A; None: all
    b_columns  output columns of B, side by side in this order; None: all
    experts    which of the stacked experts, where a module has any; None: all
    shards     over how many ranks A's rows are dealt, one by one: row i of A is row i // shards of shard
               i % shards. So a shard has ceil(r / shards) rows at an adapter's own rank r, the last of them
               zero where too few were dealt; and the shards' products, interleaved, lie as B's rows do.
    shard      this rank's number among them
    """

    a_columns: range | None = None
    b_columns: tuple[range, ...] | None = None
    shard: int = 0
    shards: int = 1
    experts: range | None = None

    def a_rows(self, rank: int) -> int:
        return -(-rank // self.shards)

    def a_width(self, in_features: int) -> int:
        return in_features if self.a_columns is None else len(self.a_columns)

    def b_width(self, out_features: int) -> int:
        return out_features if self.b_columns is None else sum(map(len, self.b_columns))

    def of_a(self, a: Array) -> Array:
        """A view of A [r, in] or [r, experts, in]: at most a_rows(r) rows, one less where the last one is
        zero."""
        rows: Array = self._of_experts(a[self.shard :: self.shards])
        if self.a_columns is None:
            return rows
        share: Array = rows[..., self.a_columns.start : self.a_columns.stop]
        return share

    def of_b(self, b: Array) -> list[Array]:
        """Views of a rank-major B [r, out] or [r, experts, out] that lie side by side in this rank's."""
        b = self._of_experts(b)
        if self.b_columns is None:
            return [b]
        return [b[..., columns.start : columns.stop : columns.step] for columns in self.b_columns]

    def _of_experts(self, stacked: Array) -> Array:
        if self.experts is None:
            return stacked
        share: Array = stacked[:, self.experts.start : self.experts.stop]
        return share

    def key(self) -> list[object]:
        """Everything that tells cuts apart, as JSON can say it."""
        a, b = self.a_columns, self.b_columns
        return [
            a and [a.start, a.stop],
            b and [[columns.start, columns.stop, columns.step] for columns in b],
            self.experts and [self.experts.start, self.experts.stop],
            self.shard,
            self.shards,
        ]
