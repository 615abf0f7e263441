"""One small instance of every layer class with LoRA, and the plain answer for its rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from executor import layers
from executor.lora import layers as lora
from executor.lora.config import DENSE_PROJECTIONS, LoRAConfig
from executor.model_config import ModelConfig
from kernels.meta import LoRAMapping, Run
from kernels.punica import PunicaWrapperCPU

HIDDEN, VOCAB = 20, 23
EVERY_KIND = DENSE_PROJECTIONS | {"embed_tokens", "lm_head", "qkv_proj", "gate_up_proj"}
MODEL_CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    max_position_embeddings=64,
    windows=(None, None),
    qkv_bias=True,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tied_head=False,
    bos_token_id=None,
    eos_token_ids=(),
)


@dataclass(frozen=True)
class LayerCase:
    layer_class: type[lora.BaseLayerWithLoRA]
    make_base: Callable[[], nn.Module]
    names: tuple[str, ...]


def _qkv() -> nn.Module:
    return layers.QKVParallelLinear(HIDDEN, 6, 4, 2, bias=True)


def _gate_up() -> nn.Module:
    return layers.MergedColumnParallelLinear(HIDDEN, (24, 24))


CASES = {
    case.layer_class.__name__: case
    for case in (
        LayerCase(
            lora.ReplicatedLinearWithLoRA, lambda: layers.ReplicatedLinear(HIDDEN, 9), ("layers.0.o_proj",)
        ),
        LayerCase(
            lora.ColumnParallelLinearWithLoRA,
            lambda: layers.ColumnParallelLinear(HIDDEN, 9, bias=True),
            ("layers.0.q_proj",),
        ),
        LayerCase(
            lora.MergedColumnParallelLinearWithLoRA, _gate_up, ("layers.0.gate_proj", "layers.0.up_proj")
        ),
        LayerCase(lora.QKVParallelLinearWithLoRA, _qkv, ("layers.0.qkv_proj",)),
        LayerCase(
            lora.MergedQKVParallelLinearWithLoRA,
            _qkv,
            ("layers.0.q_proj", "layers.0.k_proj", "layers.0.v_proj"),
        ),
        LayerCase(
            lora.RowParallelLinearWithLoRA,
            lambda: layers.RowParallelLinear(HIDDEN, 9),
            ("layers.0.down_proj",),
        ),
        LayerCase(
            lora.VocabParallelEmbeddingWithLoRA,
            lambda: layers.VocabParallelEmbedding(VOCAB, HIDDEN),
            ("embed_tokens",),
        ),
        LayerCase(lora.LogitsProcessorWithLoRA, lambda: layers.LogitsProcessor(VOCAB), ("lm_head",)),
    )
}


@dataclass
class Rig:
    """A layer with its wrapper; remembers what each slot was given, as trained (A [r, in], B [out, r])."""

    layer: lora.BaseLayerWithLoRA
    punica: PunicaWrapperCPU
    head: layers.ParallelLMHead
    adapters: dict[int, list[tuple[Tensor, Tensor, float] | None]] = field(default_factory=dict)

    def put(self, slot: int, ranks: Sequence[int], scale: float = 0.5) -> None:
        """Fill the slot with NaN, then set random factors of these ranks, one a part (0: absent)."""
        for view in (*self.layer.stacked.lora_a, *self.layer.stacked.lora_b):
            view[slot] = torch.nan
        self.put_over(slot, ranks, scale)

    def put_over(self, slot: int, ranks: Sequence[int], scale: float = 0.5) -> None:
        factors = [
            (
                torch.randn(rank, part.slot_slice.in_features) / part.slot_slice.in_features**0.5,
                torch.randn(part.slot_slice.out_features, rank) / rank**0.5,
                scale + number,
            )
            if rank
            else None
            for number, (rank, part) in enumerate(zip(ranks, self.layer.parts(MODEL_CONFIG), strict=True))
        ]
        self.set(slot, factors)

    def set(self, slot: int, factors: list[tuple[Tensor, Tensor, float] | None]) -> None:
        self.adapters[slot] = factors
        self.layer.set_lora(
            slot,
            [f and f[0] for f in factors],
            [f and f[1] for f in factors],
            [f[2] if f else 1.0 for f in factors],
        )

    def run(self, runs: Sequence[Run], x: Tensor) -> Tensor:
        """The layer's output for a step of these runs; the head's rows are the same runs."""
        self.punica.update_metadata(LoRAMapping(tuple(runs), tuple(runs)))
        return self.call(x)

    def call(self, x: Tensor) -> Tensor:
        """The layer's output under the metadata as it is."""
        return self._call(self.layer, x)

    def base(self, x: Tensor) -> Tensor:
        return self._call(self.layer.base_layer, x)

    def inputs(self, rows: int) -> Tensor:
        if isinstance(self.layer, lora.VocabParallelEmbeddingWithLoRA):
            return torch.randint(0, VOCAB, (rows,))
        return torch.randn(rows, HIDDEN)

    def expected(self, runs: Sequence[Run], x: Tensor) -> Tensor:
        """In float64, by each slot's dense matrix, from what was put and not from the stacked weights."""
        y = self.base(x).double()
        rows = (nn.functional.one_hot(x, VOCAB) if x.dtype == torch.int64 else x).double()
        first = 0
        for slot, count in runs:
            if slot >= 0:
                y[first : first + count] += rows[first : first + count] @ self._dense(slot).T
            first += count
        return y

    def _dense(self, slot: int) -> Tensor:
        parts = self.layer.parts(MODEL_CONFIG)
        factors = self.adapters.get(slot, [None] * len(parts))
        blocks = [
            f[2] * (f[1].double() @ f[0].double())
            if f
            else torch.zeros(part.slot_slice.out_features, part.slot_slice.in_features)
            for part, f in zip(parts, factors, strict=True)
        ]
        return torch.cat([block.double() for block in blocks])

    def _call(self, layer: nn.Module, x: Tensor) -> Tensor:
        on_logits = isinstance(self.layer, lora.LogitsProcessorWithLoRA)
        return layer(self.head, x) if on_logits else layer(x)


def make_rig(name: str, max_loras: int, max_rank: int, modules: frozenset[str] = EVERY_KIND) -> Rig:
    case = CASES[name]
    base, head = case.make_base(), layers.ParallelLMHead(VOCAB, HIDDEN)
    for parameter in (*base.parameters(), *head.parameters()):
        nn.init.normal_(parameter)
    layer = case.layer_class(base, case.names)
    punica = PunicaWrapperCPU(max_loras, 64)
    layer.create_lora_weights(max_loras, LoRAConfig(max_loras, max_rank, modules), MODEL_CONFIG)
    layer.set_mapping(punica)
    return Rig(layer, punica, head)
