"""The experts of one layer, stacked. Every row visits `top_k` of them; their outputs are summed by weight."""

import torch
from torch import Tensor, nn

from executor.distributed import SINGLE, ParallelGroup
from executor.layers.activation import InterleavedClampedSwiGLU, SiluAndMul
from executor.layers.fused_moe_product import expert_product
from executor.layers.fused_moe_router import Routing
from executor.model_config import MoEConfig


class FusedMoE(nn.Module):
    """y[row] = sum over j of weights[row, j] * expert ids[row, j] (x[row]); an expert is
    w2 @ act(w13 @ x + w13_bias) + w2_bias.

    Over the ranks of `group` either each expert is cut, by its intermediate columns (`intermediate_range`),
    or, with `config.expert_parallel`, whole experts are shared out (`expert_range`). Either way every rank
    has all rows and a term of each output, and the terms are summed over the ranks.

    w13 [experts, 2 * intermediate, hidden]: gate's rows, then up's; or, interleaved, in turns
    w2  [experts, hidden, intermediate]

    Raises ValueError when the ranks cannot share them.
    """

    def __init__(self, hidden_size: int, config: MoEConfig, group: ParallelGroup = SINGLE) -> None:
        super().__init__()
        self.group = group
        self.config = config
        self.hidden_size = hidden_size
        whole = range(config.num_experts), range(config.intermediate_size)
        self.expert_range, self.intermediate_range = whole
        if config.expert_parallel:
            self.expert_range = group.share(config.num_experts)
        else:
            self.intermediate_range = group.share(config.intermediate_size)
        experts, inner = len(self.expert_range), len(self.intermediate_range)
        self.w13 = _parameter(experts, 2 * inner, hidden_size)
        self.w2 = _parameter(experts, hidden_size, inner)
        self.w13_bias = _parameter(experts, 2 * inner) if config.biases else None
        self.w2_bias = _parameter(experts, hidden_size) if config.biases else None
        clamped = config.clamped
        self.act_fn = InterleavedClampedSwiGLU(clamped.alpha, clamped.limit) if clamped else SiluAndMul()

    @property
    def gate_up_ranges(self) -> tuple[range, ...]:
        """This rank's rows of a whole [2 * intermediate, hidden], as they lie one under the other in w13."""
        own, size = self.intermediate_range, self.config.intermediate_size
        if self.config.interleaved:
            return (range(2 * own.start, 2 * own.stop),)
        return own, range(size + own.start, size + own.stop)

    def local_ids(self, ids: Tensor) -> Tensor:
        """Expert ids on this rank; -1 where the expert is another rank's."""
        own = self.expert_range
        if len(own) == self.config.num_experts:
            return ids
        return torch.where((ids >= own.start) & (ids < own.stop), ids - own.start, -1)

    def gate_up(self, x: Tensor, local_ids: Tensor) -> Tensor:
        """x [rows, hidden] -> [rows, top_k, 2 * intermediate]."""
        top_k = local_ids.shape[1]
        y = expert_product(x.repeat_interleave(top_k, 0), self.w13, self.w13_bias, local_ids.flatten())
        return y.unflatten(0, (-1, top_k))

    def down(self, x: Tensor, local_ids: Tensor) -> Tensor:
        """x [rows, top_k, intermediate] -> [rows, top_k, hidden], this rank's term of it."""
        # The bias is one term of the sum over the ranks: where an expert is cut, it is in rank 0's.
        bias = self.w2_bias if self.config.expert_parallel or self.group.rank == 0 else None
        y = expert_product(x.flatten(0, 1), self.w2, bias, local_ids.flatten())
        return y.unflatten(0, local_ids.shape)

    def combine(self, y: Tensor, routing: Routing) -> Tensor:
        """y [rows, top_k, hidden] -> [rows, hidden]: by weight, over all ranks."""
        mixed = (y.float() * routing.weights[..., None]).sum(1).to(y.dtype)
        return self.group.all_reduce(mixed)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """x [rows, hidden] -> [rows, hidden], on every rank the same."""
        local_ids = self.local_ids(routing.ids)
        inner = self.act_fn(self.gate_up(x, local_ids))
        return self.combine(self.down(inner, local_ids), routing)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)
