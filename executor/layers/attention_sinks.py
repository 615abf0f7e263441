"""Attention sinks: a learned logit for each query head, which joins the softmax without a value."""

import torch
from torch import nn

from executor.distributed import SINGLE, ParallelGroup


class AttentionSinks(nn.Module):
    """One logit a query head that joins its softmax and brings no value. `weight` is this rank's heads."""

    def __init__(self, num_heads: int, group: ParallelGroup = SINGLE) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.heads = group.share(num_heads)
        self.weight = nn.Parameter(torch.empty(len(self.heads)), requires_grad=False)
