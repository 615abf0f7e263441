"""What stands for the MLP in a layer with experts: router, experts, and perhaps a shared expert.

Module names are the same for all families; `executor.models.checkpoint` knows those of the files.
"""

import torch
from torch import Tensor, nn

from executor.distributed import ParallelGroup
from executor.layers.context import ForwardContext
from executor.layers.followers import Follower
from executor.layers.fused_moe import FusedMoE
from executor.layers.fused_moe_router import route
from executor.layers.fused_moe_shared import SharedExpert
from executor.layers.linear import ReplicatedLinear
from executor.layers.model_config import MoEConfig


class MoEBlock(nn.Module):
    """hidden [rows, hidden] -> experts(hidden) + sigmoid(shared_expert_gate(hidden)) * shared(hidden)."""

    def __init__(self, hidden_size: int, config: MoEConfig, group: ParallelGroup) -> None:
        super().__init__()
        self.config = config
        self.router = ReplicatedLinear(hidden_size, config.num_experts, config.biases, group)
        self.experts = FusedMoE(hidden_size, config, group)
        shared = config.shared_intermediate_size
        self.shared_expert = SharedExpert(hidden_size, shared, group) if shared else None
        self.shared_expert_gate = ReplicatedLinear(hidden_size, 1, group=group) if shared else None

    def forward(self, hidden: Tensor, ctx: ForwardContext, then: Follower) -> Tensor:
        routing = route(self.router(hidden), self.config.top_k, renormalize=self.config.renormalize)
        out: Tensor = self.experts(hidden, routing)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            out = out + torch.sigmoid(self.shared_expert_gate(hidden)) * self.shared_expert(hidden)
        return then.plain(out)
