"""The experts of one layer, stacked: a row visits `top_k`, whose outputs are summed by weight."""

import torch
from torch import Tensor, nn

from executor.distributed import SINGLE, ParallelGroup
from executor.layers.activation import ClampedSwiGLU, ReLUSquared, SiluAndMul
from executor.layers.fused_moe_router import Routing
from executor.layers.model_config import MoEConfig
from kernels.expert_product import align_experts, expert_product
from kernels.launching.moe_blocks import MoEBlocks


class FusedMoE(nn.Module):
    """y[row] = sum over j of weights[row, j] * expert ids[row, j] (x[row]); an expert is
    w2 @ act(w13 @ x + w13_bias) + w2_bias. A pair (row, j) has number row * top_k + j.

    Over the ranks of `group` either each expert is cut, by its intermediate columns (`intermediate_range`),
    or, with `config.expert_parallel`, whole experts are shared out (`expert_range`). Either way every rank
    has all rows and a term of each output, and the terms are summed over the ranks.

    w13 [experts, 2 * intermediate, hidden]: gate's rows, then up's, also where checkpoints interleave them;
        or, without `config.gated`, [experts, intermediate, hidden]
    w2  [experts, hidden, intermediate]

    Raises ValueError when the ranks cannot share them.
    """

    expert_map: Tensor | None

    def __init__(self, hidden_size: int, config: MoEConfig, group: ParallelGroup = SINGLE) -> None:
        super().__init__()
        self.group = group
        self.config = config
        self.hidden_size = hidden_size
        cut = not config.expert_parallel
        self.expert_range = range(config.num_experts) if cut else group.share(config.num_experts)
        whole = range(config.intermediate_size)
        self.intermediate_range = group.share(config.intermediate_size) if cut else whole
        experts, inner = len(self.expert_range), len(self.intermediate_range)
        rows = 2 * inner if config.gated else inner
        self.w13 = _parameter(experts, rows, hidden_size)
        self.w2 = _parameter(experts, hidden_size, inner)
        self.w13_bias = _parameter(experts, rows) if config.biases else None
        self.w2_bias = _parameter(experts, hidden_size) if config.biases else None
        self.register_buffer("expert_map", _expert_map(config, self.expert_range), persistent=False)
        self.act_fn = _activation(config)

    @property
    def num_local_experts(self) -> int:
        return len(self.expert_range)

    @property
    def gate_up_ranges(self) -> tuple[range, ...]:
        """This rank's rows of gate and of up in a whole [2 * intermediate, hidden] of a checkpoint, or of all
        that there is without a gate."""
        own, size = self.intermediate_range, self.config.intermediate_size
        if not self.config.gated:
            return (own,)
        if self.config.interleaved:
            return range(2 * own.start, 2 * own.stop, 2), range(2 * own.start + 1, 2 * own.stop + 1, 2)
        return own, range(size + own.start, size + own.stop)

    def gate_up(self, x: Tensor, blocks: MoEBlocks) -> Tensor:
        """x [rows, hidden] -> [pairs, rows of w13]."""
        y = x.new_empty(blocks.num_pairs, self.w13.shape[1])
        expert_product(y, x, self.w13, blocks, bias=self.w13_bias)
        return y

    def down(self, x: Tensor, blocks: MoEBlocks, weights: Tensor) -> Tensor:
        """x [pairs, intermediate] -> [pairs, hidden], this rank's term of it, by weight."""
        # The bias is one term of the sum over the ranks: where an expert is cut, it is in rank 0's.
        bias = self.w2_bias if self.config.expert_parallel or self.group.rank == 0 else None
        y = x.new_empty(blocks.num_pairs, self.hidden_size)
        expert_product(y, x, self.w2, blocks, bias=bias, routed_weights=weights)
        return y

    def combine(self, y: Tensor) -> Tensor:
        """y [pairs, hidden] -> [rows, hidden]: the sum over each row's pairs, and over all ranks."""
        return self.group.all_reduce(y.view(-1, self.config.top_k, self.hidden_size).sum(1))

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """x [rows, hidden] -> [rows, hidden], on every rank the same."""
        blocks = align_experts(routing.ids, self.num_local_experts, expert_map=self.expert_map)
        inner = self.act_fn(self.gate_up(x, blocks))
        return self.combine(self.down(inner, blocks, routing.weights))


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


def _activation(config: MoEConfig) -> nn.Module:
    if not config.gated:
        return ReLUSquared()
    clamped = config.clamped
    return ClampedSwiGLU(clamped.alpha, clamped.limit) if clamped else SiluAndMul()


def _expert_map(config: MoEConfig, own: range) -> Tensor | None:
    """int32 [experts]: the place of each on this rank, -1 where it is another's. None: all are here."""
    if len(own) == config.num_experts:
        return None
    places = torch.full((config.num_experts,), -1, dtype=torch.int32)
    places[own.start : own.stop] = torch.arange(len(own), dtype=torch.int32)
    return places
