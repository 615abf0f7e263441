"""LoRA on the experts of a layer, each with its own pair for each of its matrices.

Every class has a twin for fully sharded adapters, in fused_moe_sharded.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from executor.layers.fused_moe import FusedMoE
from executor.layers.fused_moe_router import Routing
from executor.layers.model_config import ModelConfig
from executor.lora.arena import SlotArena
from executor.lora.config import LoRAConfig
from executor.lora.cut import Cut
from executor.lora.errors import ModuleShapeMismatch, RankTooLarge
from executor.lora.layers.base import BaseLayerWithLoRA, Factors, LayerPart, padded
from executor.lora.layout import SlotSlice
from kernels.expert_product import align_experts
from kernels.launching.moe_blocks import MoEBlocks


class FusedMoEWithLoRA(BaseLayerWithLoRA):
    """Three modules: w1 (gate), w2 (down) and w3 (up), or, of experts without a gate, w1 (up) and w2. A
    missing one contributes nothing.

    For a pair of a row and its expert e, h = w13_e x gets (scale * x @ A_e.T) @ B_e in gate's columns and in
    up's, then w2_e act(h) the like. What is summed over the ranks includes it. Factors as trained are
    A [experts, r, in] and B [experts, out, r], whole on every rank.
    """

    base_layer: FusedMoE
    source_types = (FusedMoE,)
    fully_sharded = False

    lora_a: tuple[Tensor, ...]
    lora_b: tuple[Tensor, ...]

    def __init__(self, base_layer: FusedMoE, module_names: Sequence[str]) -> None:
        super().__init__(base_layer, module_names)

    @classmethod
    def fits(cls, source_layer: nn.Module, modules: int) -> bool:
        if not isinstance(source_layer, FusedMoE) or source_layer.config.interleaved:
            return False
        return modules == (3 if source_layer.config.gated else 2)

    def parts(self, model_config: ModelConfig | None = None) -> tuple[LayerPart, ...]:
        w1, w2, *w3 = self.module_names
        own = self.base_layer.intermediate_range
        up = (self._into(name, (own,), column_start=len(own)) for name in w3)
        return self._into(w1, (own,)), self._out_of(w2), *up

    def served_parts(
        self, lora_config: LoRAConfig, model_config: ModelConfig | None = None
    ) -> tuple[LayerPart, ...]:
        """The parts as slots hold them: what a row meets first comes first, in one piece, and w2 last."""
        parts = super().served_parts(lora_config, model_config)
        return tuple(sorted(parts, key=lambda part: part.module.endswith(".w2")))

    def _into(self, name: str, columns: tuple[range, ...], column_start: int = 0) -> LayerPart:
        """A module from a row to columns of gate and up."""
        layer = self.base_layer
        out = len(columns) * layer.config.intermediate_size
        cut = self.first_cut(Cut(b_columns=columns, experts=self._experts()))
        return LayerPart(SlotSlice(name, layer.hidden_size, out, cut, layer.config.num_experts), column_start)

    def _out_of(self, name: str) -> LayerPart:
        layer = self.base_layer
        cut = self.last_cut(Cut(a_columns=layer.intermediate_range, experts=self._experts()))
        sizes = layer.config.intermediate_size, layer.hidden_size
        return LayerPart(SlotSlice(name, *sizes, cut, layer.config.num_experts))

    def _experts(self) -> range | None:
        layer = self.base_layer
        return layer.expert_range if layer.num_local_experts < layer.config.num_experts else None

    def first_cut(self, cut: Cut) -> Cut:
        return cut

    def last_cut(self, cut: Cut) -> Cut:
        return cut

    def create_lora_weights(
        self,
        max_loras: int,
        lora_config: LoRAConfig,
        model_config: ModelConfig | None = None,
        *,
        arena: SlotArena | None = None,
    ) -> None:
        super().create_lora_weights(max_loras, lora_config, model_config, arena=arena)
        self.lora_a = tuple(self._by_expert(weight) for weight in self.stacked.lora_a)
        self.lora_b = tuple(self._by_expert(weight) for weight in self.stacked.lora_b)

    def _by_expert(self, weight: Tensor) -> Tensor:
        """[max_loras, max_rank, experts * width] -> [max_loras, experts, max_rank, width], a view."""
        slots, rows, width = weight.shape
        experts = self.base_layer.num_local_experts
        return weight.view(slots, rows, experts, width // experts).transpose(1, 2)

    @property
    def lora_a_stacked(self) -> tuple[Tensor, ...]:
        """[max_loras, experts, max_rank, in], one a served part; of this rank, as all stacked weights."""
        return self.lora_a

    @property
    def lora_b_stacked(self) -> tuple[Tensor, ...]:
        """[max_loras, experts, out, max_rank], one a served part."""
        return tuple(weight.transpose(2, 3) for weight in self.lora_b)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """x [rows, hidden] -> [rows, hidden], as in the base layer; the rows are the step's."""
        base = self.base_layer
        experts, places = base.num_local_experts, base.expert_map
        blocks = align_experts(routing.ids, experts, expert_map=places)
        lora = self.punica_wrapper.moe_lora_align_block_size(routing.ids, experts, expert_map=places)
        h = base.gate_up(x, blocks)
        last = len(self.served) - 1
        self.add_delta(h, x, range(last), lora, None)
        inner = base.act_fn(h)
        y = base.down(inner, blocks, routing.weights)
        self.add_delta(y, inner, range(last, last + 1), lora, routing.weights)
        return base.combine(y)

    def add_delta(
        self, y: Tensor, x: Tensor, parts: range, blocks: MoEBlocks, weights: Tensor | None
    ) -> None:
        """Adds these served parts' deltas to y [pairs, columns], times `weights` [rows, top_k]."""
        own = slice(parts.start, parts.stop)
        self.punica_wrapper.add_lora_fused_moe(
            y,
            x,
            self.lora_a[own],
            self.lora_b[own],
            self.for_every_expert(self.stacked.ranks[own]),
            self.for_every_expert(self.stacked.scales[own]),
            [part.column_start for part in self.served[own]],
            blocks,
            routed_weights=weights,
        )

    def for_every_expert(self, table: Tensor) -> Tensor:
        """[slices, max_loras] -> [slices, max_loras, experts], a view."""
        return table[:, :, None].expand(-1, -1, self.base_layer.num_local_experts)

    def own_a(self, part: LayerPart, a: Tensor) -> Tensor:
        """This rank's part of A [r, experts, in]: rows with this rank's experts' columns side by side."""
        return padded(part.cut.of_a(a).flatten(1), part.cut.a_rows(len(a)))

    def own_b(self, part: LayerPart, b: Tensor) -> Tensor:
        """This rank's part of B [r, experts, out], as [experts * out, r]."""
        return torch.cat(part.cut.of_b(b), dim=-1).flatten(1).T

    def _checked_factors(
        self, lora_a: Factors, lora_b: Factors
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The factors with the rank first: A [r, experts, in], B [r, experts, out]."""
        lefts, rights = super()._checked_factors(lora_a, lora_b)
        return (
            [None if a is None else a.transpose(0, 1) for a in lefts],
            [None if b is None else b.permute(2, 0, 1) for b in rights],
        )

    def check_shapes(self, whole: SlotSlice, a: Tensor, b: Tensor) -> None:
        rank, max_rank = (a.shape[1] if a.dim() == 3 else 0), self.stacked.lora_b[0].shape[1]
        if rank > max_rank:
            raise RankTooLarge(whole.module, rank, max_rank)
        for half, tensor, expected in (
            ("lora_a", a, (whole.num_experts, rank, whole.in_features)),
            ("lora_b", b, (whole.num_experts, whole.out_features, rank)),
        ):
            if tuple(tensor.shape) != expected:
                raise ModuleShapeMismatch(f"{whole.module}.{half}", tuple(tensor.shape), expected)


class FusedMoE3DWithLoRA(FusedMoEWithLoRA):
    """Two modules: w13, one pair for gate and up together, and w2. In B, as in the checkpoint's matrix, rows
    of gate and up take turns (`config.interleaved`), or gate's come first. In a slot they always do, as in
    the base layer."""

    @classmethod
    def fits(cls, source_layer: nn.Module, modules: int) -> bool:
        return modules == 2 and isinstance(source_layer, FusedMoE) and source_layer.config.gated

    def parts(self, model_config: ModelConfig | None = None) -> tuple[LayerPart, ...]:
        w13, w2 = self.module_names
        return self._into(w13, self.base_layer.gate_up_ranges), self._out_of(w2)
