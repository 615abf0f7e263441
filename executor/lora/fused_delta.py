"""Runs a layer, its delta and what follows in the fastest way on a GPU, fused or not. Needs triton."""

from collections.abc import Callable
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor

from executor.layers.followers import FusedForm
from executor.layers.linear import LinearBase
from executor.lora.arena import StackedWeights
from executor.lora.output_factors import OutputFactors
from kernels.launching.follower_tuning import beside_pays, best_form
from kernels.launching.side_stream import SideStream
from kernels.launching.tuning import shrink_config
from kernels.lora_linear import add_pair_beside
from kernels.lora_shrink import lora_shrink
from kernels.metadata.meta import LoRAKernelMeta
from kernels.punica import PunicaWrapperBase
from kernels.punica_gpu import PunicaWrapperGPU


class LinearLayerWithLoRA(Protocol):
    """What is read here of a BaseLinearLayerWithLoRA, which calls this file."""

    base_layer: LinearBase
    punica_wrapper: PunicaWrapperBase
    stacked: StackedWeights
    output_factors: OutputFactors | None

    @property
    def column_starts(self) -> list[int]: ...

    def __call__(self, x: Tensor) -> Tensor: ...

    def scale_outputs(self, y: Tensor, meta: LoRAKernelMeta, bias: Tensor | None) -> None: ...


def followed_by(
    layer: LinearLayerWithLoRA, x: Tensor, plain: Callable[[Tensor], Tensor], form: FusedForm
) -> Tensor:
    """plain(layer(x)), in the fastest way measured for a step like this one.

    The base product reads x and nothing else, so shrink may run beside it; `form` adds what expand would,
    but in a step with DoRA's factors: they come on base and delta, before what follows.
    """
    punica = cast(PunicaWrapperGPU, layer.punica_wrapper)
    meta, stacked, factors = punica.token_mapping_meta, layer.stacked, layer.output_factors
    scaled = factors is not None and factors.marks.concern(meta)
    way = "pair" if scaled else best_form(meta.plan, form.name)
    if way == "pair":
        beside = punica.side_stream if beside_pays(meta.plan) else None
        return plain(layer(x) if beside is None else _pair_beside(layer, x, beside))
    side = punica.side_stream if way == "beside" else None
    slices = len(stacked.lora_a)
    config = shrink_config(meta.plan, slices, x.shape[1], x.element_size(), final=side is not None)
    shape = (slices, len(x), stacked.lora_a[0].shape[1])
    h = torch.empty(shape if config.final else (config.split, *shape), dtype=torch.float32, device=x.device)
    shrink = partial(lora_shrink, h, x, stacked.lora_a, stacked.ranks, stacked.scales, meta, config)
    product = partial(layer.base_layer, x)
    if side is not None:
        y = side.run_beside(product, shrink)
    else:
        y = product()
        shrink()
    return form.run(y, h, stacked.lora_b, stacked.ranks, meta)


def _pair_beside(layer: LinearLayerWithLoRA, x: Tensor, side: SideStream) -> Tensor:
    """layer(x), with shrink beside the base product."""
    stacked, meta = layer.stacked, layer.punica_wrapper.token_mapping_meta
    tables = stacked.lora_a, stacked.lora_b, stacked.ranks, stacked.scales, layer.column_starts, meta
    y = add_pair_beside(partial(layer.base_layer, x), side, x, *tables)
    layer.scale_outputs(y, meta, layer.base_layer.added_bias)
    return y
