"""DoRA (arXiv:2402.09353): a factor for each output, its magnitude over the norm of its row.

y = m / |W + s B A| * (W + s B A) x + bias, with the norm of each row.

As PEFT serves it: the norm is of the plain base weight and of this adapter alone. So there is one factor for
each output, which needs the base's weights and is computed when an adapter is first loaded. Slots hold A and
B as for any adapter; the factor comes on top of base and delta, before the bias.
"""

from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from adapter_store import LoRAModule, Weights
from executor.lora.arena import TensorCopy
from executor.lora.errors import NonFiniteWeights
from executor.lora.factor_cache import FactorCache
from executor.lora.layers import (
    BaseLayerWithLoRA,
    FusedMoEWithLoRA,
    LogitsProcessorWithLoRA,
    VocabParallelEmbeddingWithLoRA,
)
from executor.lora.output_factors import OutputFactors
from executor.lora.slot_marks import SlotMarks
from executor.models import CausalLM

_CHUNK_ROWS = 1024  # of the base's weight: bounds the memory of W + s B A


class DoRAFactors:
    """The factors of a model's slots on one rank, beside their arena, with 1 where there is none. As the
    arena, not synchronised. An adapter's are one row over all layers, so that one copy brings them.

    `marks`: the slots whose adapters have any.
    """

    def __init__(self, model: CausalLM, max_loras: int, cache_folder: Path | None = None) -> None:
        """After attach_lora. From here on the model's layers multiply with the factors of their slots.

        `cache_folder` keeps factors for later loads, of later processes too.
        """
        self._model = model
        # An adapter with magnitudes for experts is refused when it is pushed.
        self._layers = [
            layer
            for layer in model.modules()
            if isinstance(layer, BaseLayerWithLoRA) and not isinstance(layer, FusedMoEWithLoRA)
        ]
        self._ends = list(accumulate(map(_outputs, self._layers), initial=0))
        device = model.lm_head.weight.device
        self._table = torch.empty(max_loras, self._ends[-1], device=device)
        self.marks = SlotMarks(max_loras, 1, device)
        for layer, (start, end) in zip(self._layers, pairwise(self._ends), strict=True):
            layer.output_factors = OutputFactors(self._table[:, start:end], self.marks)
        weights = (self._base_rows(layer, slice(None)) for layer in self._layers)
        self._cache = None if cache_folder is None else FactorCache(cache_folder, weights)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def nbytes(self) -> int:
        """The bytes of one adapter's."""
        return 4 * self._ends[-1]

    def enter(self, slot: int, factors: Tensor | None) -> list[TensorCopy]:
        """They are the slot's from now on, and nothing of the former ones is: with the copies returned, which
        must be made before a step reads the slot. None: the adapter has none."""
        if factors is None:
            return self.clear(slot)
        return [(self._table[slot], factors), *self.marks.put(slot, 0)]

    def clear(self, slot: int) -> list[TensorCopy]:
        """Does what `enter` does, without factors."""
        return self.marks.put(slot, -1)

    @torch.inference_mode()
    def of(self, digest: str, weights: Weights) -> Tensor | None:
        """An adapter's, float32 on the CPU, on a loader's thread; None when it has none. NonFiniteWeights."""
        numbers = [n for n, layer in enumerate(self._layers) if _has_magnitude(layer, weights)]
        if not numbers:
            return None
        sizes = [_outputs(self._layers[number]) for number in numbers]
        found = self._cache.find(digest, sum(sizes)) if self._cache is not None else None
        if found is None:
            with torch.cuda.stream(self._stream):  # beside the steps that run; None: nothing to do
                found = torch.cat([self._layer_factors(self._layers[number], weights) for number in numbers])
            if self._cache is not None:
                self._cache.keep(digest, found)
        row = torch.ones(self._ends[-1])
        for number, factors in zip(numbers, torch.split(found, sizes), strict=True):
            row[self._ends[number] : self._ends[number + 1]] = factors
        return row

    def _layer_factors(self, layer: BaseLayerWithLoRA, weights: Weights) -> Tensor:
        factors = torch.ones(_outputs(layer))
        for part in layer.all_parts:
            module = weights.get(part.module)
            if module is not None and module.magnitude is not None:
                columns = slice(part.column_start, part.column_start + part.slot_slice.out_features)
                factors[columns] = output_factors(self._base_rows(layer, columns), module)
        return factors

    def _base_rows(self, layer: BaseLayerWithLoRA, columns: slice) -> Tensor:
        """The base's weight of these outputs, [outputs, in]."""
        if isinstance(layer, LogitsProcessorWithLoRA):
            return self._model.lm_head.weight[columns]
        weight: Tensor = layer.base_layer.weight  # type: ignore[assignment]
        return weight.T if isinstance(layer, VocabParallelEmbeddingWithLoRA) else weight[columns]


def output_factors(weight: Tensor, module: LoRAModule) -> Tensor:
    """magnitude / |W + scale * B A|, row by row, in float32: [out]. `weight` is W [out, in].

    Raises NonFiniteWeights where a norm is 0.
    """
    a = torch.from_numpy(np.array(module.lora_a, np.float32)).to(weight.device)
    b = torch.from_numpy(np.array(module.lora_b, np.float32)).to(weight.device)
    norms = [
        torch.linalg.norm(
            weight[start : start + _CHUNK_ROWS].float()
            + module.scale * (b[:, start : start + _CHUNK_ROWS].T @ a),
            dim=1,
        )
        for start in range(0, len(weight), _CHUNK_ROWS)
    ]
    magnitude = torch.from_numpy(np.array(module.magnitude, np.float32))
    factors = magnitude / torch.cat(norms).cpu()
    if not torch.isfinite(factors).all():
        raise NonFiniteWeights(f"{module.name}.magnitude", str(module.lora_a.dtype), "a factor")
    return factors


def _has_magnitude(layer: BaseLayerWithLoRA, weights: Weights) -> bool:
    modules = (weights.get(part.module) for part in layer.all_parts)
    return any(module is not None and module.magnitude is not None for module in modules)


def _outputs(layer: BaseLayerWithLoRA) -> int:
    if isinstance(layer, VocabParallelEmbeddingWithLoRA):
        return layer.base_layer.embedding_dim
    if isinstance(layer, LogitsProcessorWithLoRA):
        return layer.base_layer.vocab_size
    width: int = layer.base_layer.output_size_per_partition  # type: ignore[assignment]
    return width
