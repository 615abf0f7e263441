"""The shared expert of a layer: every row visits it, beside those that are chosen for the row."""

from torch import Tensor, nn

from executor.distributed import SINGLE, ParallelGroup
from executor.layers.activation import SiluAndMul
from executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear


class SharedExpert(nn.Module):
    """The expert that every row visits: down(silu(gate x) * up x)."""

    def __init__(self, hidden_size: int, intermediate_size: int, group: ParallelGroup = SINGLE) -> None:
        super().__init__()
        sizes = (intermediate_size, intermediate_size)
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, sizes, group=group)
        self.act_fn = SiluAndMul()
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, group=group)

    def forward(self, x: Tensor) -> Tensor:
        """x [rows, hidden] -> [rows, hidden], on every rank the same."""
        out: Tensor = self.down_proj(self.act_fn(self.gate_up_proj(x)))
        return out
