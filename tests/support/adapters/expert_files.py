"""One adapter of experts as the files that trainers and versions of PEFT wrote for it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.adapters.peft import raw_adapter

LEAVES = {"mlp": ("gate_proj", "up_proj", "down_proj"), "block_sparse_moe": ("w1", "w3", "w2")}
FUSED = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


@dataclass(frozen=True)
class ExpertAdapter:
    """By layer: A and B of gate and up together, then of down: A [experts, r, in], B [experts, out, r]."""

    layers: Mapping[int, tuple[Tensor, Tensor, Tensor, Tensor]]

    @classmethod
    def draw(cls, experts: int, rank: int, hidden: int, inner: int, *, layers: int = 2, seed: int = 0):  # type: ignore[no-untyped-def]
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(experts, *shape, generator=generator) * 0.2

        return cls(
            {
                layer: (
                    normal(rank, hidden),
                    normal(2 * inner, rank),
                    normal(rank, inner),
                    normal(hidden, rank),
                )
                for layer in range(layers)
            }
        )

    @property
    def rank(self) -> int:
        return self.layers[0][0].shape[1]

    def only(self, experts: Collection[int]) -> "ExpertAdapter":
        """With B zero for all other experts."""

        def kept(b: Tensor) -> Tensor:
            mask = torch.tensor([float(e in experts) for e in range(len(b))])
            return b * mask[:, None, None]

        return ExpertAdapter(
            {layer: (a13, kept(b13), a2, kept(b2)) for layer, (a13, b13, a2, b2) in self.layers.items()}
        )

    def now(self, folder: Path, **config: Any) -> Path:
        """As PEFT 0.19 and later writes it."""
        return self._fused(folder, _rows, _columns, **{"peft_version": "0.21.2", **config})

    def before_019(self, folder: Path, **config: Any) -> Path:
        """As PEFT 0.17 and 0.18 wrote it for parameters [experts, out, in]."""
        config = {"peft_version": "0.18.1", **config}
        return self._fused(folder, _columns_from_a, _rows_from_b, swapped=True, **config)

    def in_blocks(self, folder: Path, **config: Any) -> Path:
        """As trainers write it that put an expert's columns of B side by side."""
        return self._fused(folder, _rows, _blocks, **{"peft_version": "0.21.2", **config})

    def one_by_one(
        self, folder: Path, parent: str = "mlp", experts: Collection[int] = range(4), **config: Any
    ) -> Path:
        """A pair an expert and matrix, gate and up apart with the same A."""
        tensors = {}
        gate, up, down = LEAVES[parent]
        for layer, (a13, b13, a2, b2) in self.layers.items():
            for expert in experts:
                b1, b3 = b13[expert].chunk(2)
                for leaf, a, b in ((gate, a13, b1), (up, a13, b3), (down, a2, b2[expert])):
                    path = f"base_model.model.model.layers.{layer}.{parent}.experts.{expert}.{leaf}"
                    tensors[f"{path}.lora_A.weight"] = a[expert].clone()
                    tensors[f"{path}.lora_B.weight"] = b.clone()
        modules = {"target_modules": list(LEAVES[parent]), "peft_version": "0.17.1"}
        return raw_adapter(folder, tensors, **{"r": self.rank, **modules, **config})

    def _fused(self, folder: Path, left: Any, right: Any, *, swapped: bool = False, **config: Any) -> Path:
        tensors = {}
        for layer, (a13, b13, a2, b2) in self.layers.items():
            path = f"base_model.model.model.layers.{layer}.mlp.experts"
            for inner, a, b in (("base_layer.", a13, b13), ("", a2, b2)):
                first, second = (b, a) if swapped else (a, b)
                tensors[f"{path}.{inner}lora_A.weight"] = left(first)
                tensors[f"{path}.{inner}lora_B.weight"] = right(second)
        return raw_adapter(folder, tensors, **{"r": self.rank, **FUSED, **config})


def _rows(a: Tensor) -> Tensor:
    """[experts, r, in] -> [experts * r, in]."""
    return a.flatten(0, 1)


def _columns(b: Tensor) -> Tensor:
    """[experts, out, r] -> [out, r * experts], the expert fastest."""
    return b.permute(1, 2, 0).flatten(1)


def _blocks(b: Tensor) -> Tensor:
    """[experts, out, r] -> [out, experts * r], the expert slowest."""
    return b.permute(1, 0, 2).flatten(1)


def _columns_from_a(b: Tensor) -> Tensor:
    """The old lora_A: B [experts, out, r] as [experts * r, out]."""
    return b.transpose(1, 2).flatten(0, 1)


def _rows_from_b(a: Tensor) -> Tensor:
    """The old lora_B: A [experts, r, in] as [in, r * experts]."""
    return a.permute(2, 1, 0).flatten(1)
