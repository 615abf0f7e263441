"""A decoder layer's projections with what follows each, with LoRA in several forms or without."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kernels.bench.inputs import Case, WeightSet
from kernels.launching.follower import PagedCache
from kernels.launching.follower_tuning import Follower, FollowerConfig
from kernels.launching.side_stream import SideStream
from kernels.launching.tuning import shrink_config
from kernels.lora_expand_add_rms_norm import add_rms_norm, lora_expand_add_rms_norm
from kernels.lora_expand_rope import lora_expand_rope, rope
from kernels.lora_expand_silu_mul import lora_expand_silu_mul, silu_mul
from kernels.lora_linear import add_pair, add_pair_beside
from kernels.lora_shrink import lora_shrink
from kernels.metadata.meta import LoRAKernelMeta

HEAD_DIM, KV_HEADS, BLOCK_SIZE = 128, 8, 16
EPS = 1e-5
# Without LoRA, and kernels.launching.follower_tuning's forms, the pair also with shrink beside the product.
FORMS = ("none", "pair", "pair_beside", "fused", "beside")

Fused = Callable[[Tensor, Tensor, Sequence[Tensor], LoRAKernelMeta], None]


@dataclass(frozen=True, slots=True)
class Projection:
    """`plain(y)` is the follower by itself, `fused(y, h, lora_b, meta)` the one that also expands; both leave
    their result in `out`, the next projection's input."""

    case: Case
    follower: Follower
    plain: Callable[[Tensor], None]
    fused: Fused
    out: Tensor
    side: SideStream

    def run(self, form: str, index: int, x: Tensor) -> Tensor:
        """The base product, LoRA and the follower. Weights, slots and outputs rotate with the index."""
        case = self.case
        y = case.ys[index % len(case.ys)]
        weights = case.weights[(index // len(case.metas)) % len(case.weights)]
        meta = case.metas[index % len(case.metas)]
        product = partial(torch.mm, x, case.bases[index % len(case.bases)].t(), out=y)
        if form in ("fused", "beside"):
            h, shrink = self._shrink(x, weights, meta, final=form == "beside")
            if form == "beside":
                self.side.run_beside(product, shrink)
            else:
                product()
                shrink()
            self.fused(y, h, weights.lora_b, meta)
            return self.out
        tables = case.ranks, case.scales, case.column_starts, meta
        if form == "pair_beside":
            add_pair_beside(product, self.side, x, weights.lora_a, weights.lora_b, *tables)
        else:
            product()
            if form == "pair":
                add_pair(y, x, weights.lora_a, weights.lora_b, *tables)
        self.plain(y)
        return self.out

    def add(self, index: int, x: Tensor) -> None:
        """Shrink and the fused follower alone, on whatever y holds."""
        case = self.case
        weights = case.weights[(index // len(case.metas)) % len(case.weights)]
        meta = case.metas[index % len(case.metas)]
        h, shrink = self._shrink(x, weights, meta)
        shrink()
        self.fused(case.ys[index % len(case.ys)], h, weights.lora_b, meta)

    def _shrink(
        self, x: Tensor, weights: WeightSet, meta: LoRAKernelMeta, *, final: bool = False
    ) -> tuple[Tensor, Callable[[], None]]:
        case, slices = self.case, len(self.case.layer.slices)
        config = shrink_config(meta.plan, slices, case.layer.width, x.element_size(), final=final)
        shape = (slices, case.tokens, weights.lora_a[0].shape[1])
        h = torch.empty(shape if config.final else (config.split, *shape), device=x.device)
        return h, partial(lora_shrink, h, x, weights.lora_a, case.ranks, case.scales, meta, config)


def make_projection(case: Case, side: SideStream, config: FollowerConfig | None = None) -> Projection:
    """config: of the fused rotation or SiLU-mul, None: the tuned one."""
    if case.layer.name == "qkv":
        return _rope(case, side, config)
    if case.layer.name == "gate_up":
        return _silu_mul(case, side, config)
    return _add_rms_norm(case, side)


def _rope(case: Case, side: SideStream, config: FollowerConfig | None) -> Projection:
    """The rotation leaves q in y, which stands for attention's output: all y share one memory."""
    case = replace(case, ys=case.ys[:1])
    angles = torch.rand(case.tokens, HEAD_DIM // 2, device="cuda") * 6
    cos, sin = angles.cos(), angles.sin()
    blocks = case.tokens // BLOCK_SIZE + 1
    shape = (2, blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    data = torch.zeros(shape, device="cuda", dtype=case.ys[0].dtype)
    cache = PagedCache(data, torch.randperm(blocks * BLOCK_SIZE, device="cuda")[: case.tokens])

    def fused(y: Tensor, h: Tensor, lora_b: Sequence[Tensor], meta: LoRAKernelMeta) -> None:
        lora_expand_rope(y, h, lora_b, case.ranks, cos, sin, meta, cache, config)

    def plain(y: Tensor) -> None:
        rope(y, cos, sin, KV_HEADS * HEAD_DIM, cache)

    return Projection(case, "rope", plain, fused, case.ys[0][:, : case.layer.slices[0]], side)


def _silu_mul(case: Case, side: SideStream, config: FollowerConfig | None) -> Projection:
    out = case.ys[0].new_empty(case.tokens, case.layer.slices[0])

    def fused(y: Tensor, h: Tensor, lora_b: Sequence[Tensor], meta: LoRAKernelMeta) -> None:
        lora_expand_silu_mul(out, y, h, lora_b, case.ranks, meta, config)

    return Projection(case, "silu_mul", lambda y: silu_mul(out, y), fused, out, side)


def _add_rms_norm(case: Case, side: SideStream) -> Projection:
    out, residual = (torch.zeros_like(case.ys[0]) for _ in range(2))
    weight = torch.rand(case.layer.columns, device="cuda").to(out.dtype) + 0.5

    def fused(y: Tensor, h: Tensor, lora_b: Sequence[Tensor], meta: LoRAKernelMeta) -> None:
        lora_expand_add_rms_norm(out, residual, y, h, lora_b[0], case.ranks, weight, EPS, meta)

    return Projection(
        case, "add_rms_norm", lambda y: add_rms_norm(out, residual, y, weight, EPS), fused, out, side
    )
