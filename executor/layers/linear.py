"""Linear layers, named by how tensor parallelism splits them; on one rank each is the whole matrix."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from executor.distributed import SINGLE, ParallelGroup
from executor.layers.followers import Follower

# y, or, with `return_bias`, y and the bias that is not in it.
Output = Tensor | tuple[Tensor, Tensor | None]


class LinearBase(nn.Module):
    """y[row] = weight @ x[row] + bias, of which each rank of `group` holds a part.

    Of the whole layer: `input_size`, `output_size`, `output_sizes` (widths of the parts that are stacked in
    the output, in order; a plain layer has one), `tensor_parts` (how many parts each tensor of a checkpoint
    covers). Of this rank: `input_range` (its columns of the weight), `output_ranges` (its rows of each part),
    `output_partition_sizes` (their widths, stacked in this rank's output), `weight`
    [output_size_per_partition, input_size_per_partition], and `bias` beside its rows, or None.

    With `skip_bias_add` y has no bias, for whoever adds it in another kernel; with `return_bias` forward
    returns a pair of y and the bias that was left out, which is None where none was.

    Raises ValueError when the ranks cannot share it.
    """

    def __init__(
        self,
        output_sizes: Sequence[int],
        bias: bool,
        group: ParallelGroup,
        *,
        input_size: int,
        input_range: range,
        output_ranges: Sequence[range],
        tensor_parts: Sequence[int] = (),
        skip_bias_add: bool = False,
        return_bias: bool = False,
    ) -> None:
        super().__init__()
        self.skip_bias_add = skip_bias_add
        self.return_bias = return_bias
        self.group = group
        self.input_size = input_size
        self.output_sizes = tuple(output_sizes)
        self.output_size = sum(output_sizes)
        self.tensor_parts = tuple(tensor_parts) or (1,) * len(self.output_sizes)
        if sum(self.tensor_parts) != len(self.output_sizes):
            raise ValueError(
                f"tensor_parts {self.tensor_parts} do not add up to {len(self.output_sizes)} parts"
            )
        self.input_range = input_range
        self.input_size_per_partition = len(input_range)
        self.output_ranges = tuple(output_ranges)
        self.output_partition_sizes = tuple(len(rows) for rows in output_ranges)
        self.output_size_per_partition = sum(self.output_partition_sizes)
        shape = (self.output_size_per_partition, self.input_size_per_partition)
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(shape[0]), requires_grad=False) if bias else None

    def parts_behind(self, tensors: int) -> tuple[range, ...] | None:
        """The parts that each of `tensors` stacked tensors covers: one over all of them, one a part, or as
        `tensor_parts` says. None for any other number."""
        if tensors == 1:
            return (range(len(self.output_sizes)),)
        covers = (1,) * tensors if tensors == len(self.output_sizes) else self.tensor_parts
        if tensors != len(covers):
            return None
        return tuple(range(start, stop) for start, stop in pairwise(accumulate(covers, initial=0)))

    def rows_in_tensor(self, parts: range) -> tuple[range, ...]:
        """This rank's rows of a whole tensor in which these parts are stacked, as they lie in its output."""
        rows, offset = [], 0
        for number in parts:
            own = self.output_ranges[number]
            rows.append(range(offset + own.start, offset + own.stop))
            offset += self.output_sizes[number]
        return tuple(rows)

    @property
    def added_bias(self) -> Tensor | None:
        """The bias that is in y."""
        return None if self.skip_bias_add else self.bias

    def own_input(self, x: Tensor) -> Tensor:
        """What this rank multiplies of the x that `forward` is given: [rows, input_size_per_partition]."""
        return x

    def partial(self, x: Tensor) -> Tensor:
        """What this rank computes by itself, of its own input: [rows, output_size_per_partition]."""
        return F.linear(x, self.weight, self.added_bias)

    def exchange(self, y: Tensor) -> Tensor:
        """What the ranks make of each one's `partial`; y may be changed."""
        return y

    def output(self, y: Tensor) -> Output:
        """What `forward` returns for this y."""
        if not self.return_bias:
            return y
        return y, self.bias if self.skip_bias_add else None

    def forward(self, x: Tensor) -> Output:
        """x [rows, input_size_per_partition] -> [rows, output_size_per_partition]."""
        return self.output(self.exchange(self.partial(self.own_input(x))))

    def followed_by(self, x: Tensor, follower: Follower) -> Tensor:
        """What `follower` makes of this layer's output, which must be y alone."""
        return follower.plain(self(x))


class ReplicatedLinear(LinearBase):
    """Whole on every rank."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = False,
        group: ParallelGroup = SINGLE,
        *,
        skip_bias_add: bool = False,
        return_bias: bool = False,
    ) -> None:
        super().__init__(
            (output_size,),
            bias,
            group,
            input_size=input_size,
            input_range=range(input_size),
            output_ranges=(range(output_size),),
            skip_bias_add=skip_bias_add,
            return_bias=return_bias,
        )


class ColumnParallelLinear(LinearBase):
    """Split by output columns: each rank's output is its part, and nothing is exchanged. With `gather_output`
    every rank's output is whole."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = False,
        group: ParallelGroup = SINGLE,
        *,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        return_bias: bool = False,
    ) -> None:
        super().__init__(
            (output_size,),
            bias,
            group,
            input_size=input_size,
            input_range=range(input_size),
            output_ranges=(group.share(output_size),),
            skip_bias_add=skip_bias_add,
            return_bias=return_bias,
        )
        if gather_output and skip_bias_add and bias and group.size > 1:
            raise ValueError(
                "gather_output with skip_bias_add: y would be whole, and the bias a rank's share"
            )
        self.gather_output = gather_output

    def exchange(self, y: Tensor) -> Tensor:
        return self.group.gather_columns(y) if self.gather_output else y


class MergedColumnParallelLinear(LinearBase):
    """Several column-parallel layers over one input, stacked: gate and up as gate_up. Each is cut alone."""

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        bias: bool = False,
        group: ParallelGroup = SINGLE,
        tensor_parts: Sequence[int] = (),
        *,
        skip_bias_add: bool = False,
        return_bias: bool = False,
    ) -> None:
        super().__init__(
            output_sizes,
            bias,
            group,
            input_size=input_size,
            input_range=range(input_size),
            output_ranges=[group.share(size) for size in output_sizes],
            tensor_parts=tensor_parts,
            skip_bias_add=skip_bias_add,
            return_bias=return_bias,
        )


class QKVParallelLinear(LinearBase):
    """q, k and v stacked: `num_heads` query heads, then `num_kv_heads` key heads and as many value heads.

    Cut by heads. With fewer KV heads than ranks, neighbours hold the same one: the one that their query heads
    read. `num_heads_per_partition` and `num_kv_heads_per_partition` are this rank's numbers.
    """

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool = False,
        group: ParallelGroup = SINGLE,
        *,
        skip_bias_add: bool = False,
        return_bias: bool = False,
    ) -> None:
        q_heads, kv_heads = group.share(num_heads), kv_head_share(num_kv_heads, group)
        super().__init__(
            (num_heads * head_size, num_kv_heads * head_size, num_kv_heads * head_size),
            bias,
            group,
            input_size=hidden_size,
            input_range=range(hidden_size),
            output_ranges=[_rows_of(heads, head_size) for heads in (q_heads, kv_heads, kv_heads)],
            skip_bias_add=skip_bias_add,
            return_bias=return_bias,
        )
        self.hidden_size = hidden_size
        self.head_size = head_size
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.num_heads_per_partition = len(q_heads)
        self.num_kv_heads_per_partition = len(kv_heads)


class RowParallelLinear(LinearBase):
    """Split by input columns: each rank's input is its part, and the ranks' partial outputs are summed."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = False,
        group: ParallelGroup = SINGLE,
        *,
        input_is_parallel: bool = True,
        reduce_results: bool = True,
        skip_bias_add: bool = False,
        return_bias: bool = False,
    ) -> None:
        super().__init__(
            (output_size,),
            bias,
            group,
            input_size=input_size,
            input_range=group.share(input_size),
            output_ranges=(range(output_size),),
            skip_bias_add=skip_bias_add,
            return_bias=return_bias,
        )
        self.input_is_parallel = input_is_parallel
        self.reduce_results = reduce_results

    def own_input(self, x: Tensor) -> Tensor:
        if self.input_is_parallel:
            return x
        return x[:, self.input_range.start : self.input_range.stop].contiguous()

    def partial(self, x: Tensor) -> Tensor:
        """This rank's term of the sum; the bias is in rank 0's."""
        return F.linear(x, self.weight, self.added_bias if self.group.rank == 0 else None)

    def exchange(self, y: Tensor) -> Tensor:
        return self.group.all_reduce(y) if self.reduce_results else y

    def forward(self, x: Tensor) -> Output:
        """x [rows, input_size_per_partition], or [rows, input_size] without `input_is_parallel` ->
        [rows, output_size], on every rank the same, or its term of it without `reduce_results`."""
        return super().forward(x)


def kv_head_share(num_kv_heads: int, group: ParallelGroup) -> range:
    """This rank's KV heads: its share, or, with more ranks than heads, the one it has in common with others.

    ValueError unless one of the two numbers divides the other.
    """
    if num_kv_heads >= group.size:
        return group.share(num_kv_heads)
    if group.size % num_kv_heads:
        raise ValueError(f"{num_kv_heads} KV heads cannot be cut over {group.size} ranks")
    head = group.rank // (group.size // num_kv_heads)
    return range(head, head + 1)


def _rows_of(heads: range, head_size: int) -> range:
    return range(heads.start * head_size, heads.stop * head_size)
