"""Which experts a row goes to, and how much each of them counts."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """ids int64 [rows, top_k], weights float32 [rows, top_k]."""

    ids: Tensor
    weights: Tensor


def route(logits: Tensor, top_k: int, *, renormalize: bool) -> Routing:
    """logits [rows, experts]: the top_k largest, weighted by softmax over all experts, or, with
    `renormalize`, over the chosen ones; which is the same as dividing the former by their sum."""
    wide = logits.float()
    chosen, ids = torch.topk(wide, top_k, dim=-1)
    if renormalize:
        return Routing(ids, torch.softmax(chosen, dim=-1))
    return Routing(ids, torch.softmax(wide, dim=-1).gather(-1, ids))
