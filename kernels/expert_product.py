"""The base model's expert products, on whatever device the tensors are."""

from torch import Tensor

from kernels.launching.moe_blocks import MoEBlocks
from kernels.launching.moe_tuning import gemm_block_size
from kernels.reference import moe_gemm as reference
from kernels.reference import moe_lora_align as reference_align


def align_experts(topk_ids: Tensor, num_experts: int, *, expert_map: Tensor | None = None) -> MoEBlocks:
    """A step's expert choices by expert, for `expert_product`; once an expert layer.

    topk_ids int32 or int64 [rows, topk] holds global numbers; expert_map int32 [global experts] gives the
    place among the `num_experts` that are here, or -1. Raises KernelArgumentError.
    """
    if topk_ids.is_cuda:
        from kernels import moe_lora_align  # needs triton

        size = gemm_block_size(topk_ids.numel(), num_experts)
        return moe_lora_align.moe_align_block_size(topk_ids, num_experts, size, expert_map=expert_map)
    # A block for all pairs of an expert: one product each.
    size = max(1, topk_ids.numel())
    return reference_align.moe_align_block_size(topk_ids, num_experts, size, expert_map=expert_map)


def expert_product(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    blocks: MoEBlocks,
    *,
    bias: Tensor | None = None,
    routed_weights: Tensor | None = None,
) -> None:
    """y[p] = w[p] * (x[row(p)] @ weight[e(p)].T + bias[e(p)]), 0 where the expert is elsewhere.

    p = row * topk + k is an expert choice; the arguments are those of kernels/reference/moe_gemm.py.
    """
    if y.is_cuda:
        from kernels.moe_gemm import moe_gemm  # needs triton

        moe_gemm(y, x, weight, blocks, bias=bias, routed_weights=routed_weights)
        return
    reference.moe_gemm(y, x, weight, blocks, bias=bias, routed_weights=routed_weights)
