"""A layer's delta inside what follows the layer, on a GPU. Needs triton."""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor

from executor.layers.followers import FusedForm
from executor.lora.layers.base_linear import BaseLinearLayerWithLoRA
from kernels.follower_tuning import beside_pays, best_form
from kernels.lora_linear import add_pair_beside
from kernels.lora_shrink import lora_shrink
from kernels.punica_gpu import PunicaWrapperGPU
from kernels.side_stream import SideStream
from kernels.tuning import shrink_config


def followed_by(
    layer: BaseLinearLayerWithLoRA, x: Tensor, plain: Callable[[Tensor], Tensor], form: FusedForm
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


def _pair_beside(layer: BaseLinearLayerWithLoRA, x: Tensor, side: SideStream) -> Tensor:
    """layer(x), with shrink beside the base product."""
    stacked, meta = layer.stacked, layer.punica_wrapper.token_mapping_meta
    starts = [part.column_start for part in layer.served]
    tables = stacked.lora_a, stacked.lora_b, stacked.ranks, stacked.scales, starts, meta
    y = add_pair_beside(partial(layer.base_layer, x), side, x, *tables)
    layer.scale_outputs(y, meta, layer.base_layer.bias)
    return y
