"""The product of rows with the matrices of their own experts, in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def expert_product(x: Tensor, weight: Tensor, bias: Tensor | None, expert_ids: Tensor) -> Tensor:
    """Semantics: y[p] = weight[expert_ids[p]] @ x[p] + bias[expert_ids[p]], and 0 where the id is -1.

    x [pairs, in], weight [experts, out, in], bias [experts, out] or None, expert_ids int [pairs]; returns
    [pairs, out]. One product for each expert that occurs.
    """
    y = x.new_zeros(len(x), weight.shape[1])
    order = torch.argsort(expert_ids, stable=True)
    experts, counts = torch.unique_consecutive(expert_ids[order], return_counts=True)
    start = 0
    for expert, count in zip(experts.tolist(), counts.tolist(), strict=True):
        pairs = order[start : start + count]
        start += count
        if expert >= 0:
            y[pairs] = F.linear(x[pairs], weight[expert], None if bias is None else bias[expert])
    return y
