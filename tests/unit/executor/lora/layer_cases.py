"""One small instance of every layer class with LoRA, on one rank or several, and the plain answer for its
rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from adapter_store.module_names import DENSE_PROJECTIONS
from executor import layers
from executor.distributed import SINGLE, ParallelGroup
from executor.layers import LinearBase, VocabParallelEmbedding
from executor.layers.model_config import ModelConfig
from executor.lora import layers as lora
from executor.lora.arena import SlotArena
from executor.lora.config import LoRAConfig
from executor.lora.layout import SlotLayout
from executor.lora.replace import class_for
from kernels.metadata.meta import LoRAMapping, Run
from kernels.punica import PunicaWrapperBase, PunicaWrapperCPU

HIDDEN, VOCAB = 20, 23
WHOLE_KINDS = {"qkv_proj", "gate_up_proj", "in_proj", "in_proj_qkv", "in_proj_z", "in_a", "in_b", "in_c"}
EVERY_KIND = frozenset(DENSE_PROJECTIONS) | {"embed_tokens", "lm_head"} | WHOLE_KINDS
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
    eos_token_ids=(),
)

MakeBase = Callable[[ParallelGroup], nn.Module]


@dataclass(frozen=True)
class LayerCase:
    layer_class: type[lora.BaseLayerWithLoRA]
    make_base: MakeBase
    names: tuple[str, ...]
    sharded_class: type[lora.BaseLayerWithLoRA] | None = None  # None: `layer_class` serves both


def _qkv(group: ParallelGroup) -> nn.Module:
    return layers.QKVParallelLinear(HIDDEN, 6, 4, 2, True, group)


def _merged(*sizes: int, tensor_parts: tuple[int, ...] = ()) -> MakeBase:
    return lambda group: layers.MergedColumnParallelLinear(HIDDEN, sizes, False, group, tensor_parts)


def _named(*kinds: str) -> tuple[str, ...]:
    return tuple(f"layers.0.{kind}" for kind in kinds)


CASES = {
    "replicated": LayerCase(
        lora.ReplicatedLinearWithLoRA,
        lambda group: layers.ReplicatedLinear(HIDDEN, 9, False, group),
        _named("o_proj"),
    ),
    "column": LayerCase(
        lora.ColumnParallelLinearWithLoRA,
        lambda group: layers.ColumnParallelLinear(HIDDEN, 12, True, group),
        _named("q_proj"),
        lora.ColumnParallelLinearWithShardedLoRA,
    ),
    "one over two parts": LayerCase(
        lora.ColumnParallelLinearWithLoRA,
        _merged(24, 24),
        _named("gate_up_proj"),
        lora.ColumnParallelLinearWithShardedLoRA,
    ),
    "two parts": LayerCase(
        lora.MergedColumnParallelLinearWithLoRA,
        _merged(24, 24),
        _named("gate_proj", "up_proj"),
        lora.MergedColumnParallelLinearWithShardedLoRA,
    ),
    "two over four parts": LayerCase(
        lora.MergedColumnParallelLinearWithLoRA,
        _merged(8, 8, 16, 12, tensor_parts=(3, 1)),
        _named("in_proj_qkv", "in_proj_z"),
        lora.MergedColumnParallelLinearWithShardedLoRA,
    ),
    "three parts": LayerCase(
        lora.MergedColumnParallelLinearVariableSliceWithLoRA,
        _merged(8, 16, 4),
        _named("in_a", "in_b", "in_c"),
        lora.MergedColumnParallelLinearVariableSliceWithShardedLoRA,
    ),
    "one over three parts": LayerCase(
        lora.MergedColumnParallelLinearVariableSliceWithLoRA,
        _merged(8, 16, 4),
        _named("in_proj"),
        lora.MergedColumnParallelLinearVariableSliceWithShardedLoRA,
    ),
    "one over qkv": LayerCase(
        lora.QKVParallelLinearWithLoRA, _qkv, _named("qkv_proj"), lora.QKVParallelLinearWithShardedLoRA
    ),
    "qkv": LayerCase(
        lora.MergedQKVParallelLinearWithLoRA,
        _qkv,
        _named("q_proj", "k_proj", "v_proj"),
        lora.MergedQKVParallelLinearWithShardedLoRA,
    ),
    "row": LayerCase(
        lora.RowParallelLinearWithLoRA,
        lambda group: layers.RowParallelLinear(HIDDEN, 12, True, group),
        _named("down_proj"),
        lora.RowParallelLinearWithShardedLoRA,
    ),
    "column, gathered": LayerCase(
        lora.ColumnParallelLinearWithLoRA,
        lambda group: layers.ColumnParallelLinear(HIDDEN, 12, True, group, gather_output=True),
        _named("q_proj"),
        lora.ColumnParallelLinearWithShardedLoRA,
    ),
    "row, of whole inputs": LayerCase(
        lora.RowParallelLinearWithLoRA,
        lambda group: layers.RowParallelLinear(HIDDEN, 12, True, group, input_is_parallel=False),
        _named("down_proj"),
        lora.RowParallelLinearWithShardedLoRA,
    ),
    "row, bias apart": LayerCase(
        lora.RowParallelLinearWithLoRA,
        lambda group: layers.RowParallelLinear(HIDDEN, 12, True, group, skip_bias_add=True, return_bias=True),
        _named("down_proj"),
        lora.RowParallelLinearWithShardedLoRA,
    ),
    "embedding": LayerCase(
        lora.VocabParallelEmbeddingWithLoRA,
        lambda group: VocabParallelEmbedding(VOCAB, HIDDEN, group),
        ("embed_tokens",),
    ),
    "head": LayerCase(
        lora.LogitsProcessorWithLoRA, lambda group: layers.LogitsProcessor(VOCAB, group), ("lm_head",)
    ),
    "head, capped and scaled": LayerCase(
        lora.LogitsProcessorWithLoRA,
        lambda group: layers.LogitsProcessor(VOCAB, group, scale=0.25, soft_cap=6.0),
        ("lm_head",),
    ),
}


@dataclass
class Rig:
    """A layer with its wrapper, beside the whole base layer; remembers what each slot was given."""

    layer: lora.BaseLayerWithLoRA
    whole: nn.Module
    punica: PunicaWrapperBase
    head: layers.ParallelLMHead  # this rank's
    whole_head: layers.ParallelLMHead
    device: str
    adapters: dict[int, list[tuple[Tensor, Tensor, float] | None]] = field(default_factory=dict)

    def poison(self, slot: int) -> None:
        """NaN over all that the slot holds of this layer, so that whatever is read beyond a rank shows."""
        for view in (*self.layer.stacked.lora_a, *self.layer.stacked.lora_b):
            view[slot] = torch.nan

    def put(self, slot: int, ranks: Sequence[int], scale: float = 0.5) -> None:
        """Fill the slot with NaN, then set random factors of these ranks, one a part (0: absent)."""
        self.poison(slot)
        self.put_over(slot, ranks, scale)

    def put_over(self, slot: int, ranks: Sequence[int], scale: float = 0.5) -> None:
        factors = []
        for number, (rank, part) in enumerate(zip(ranks, self.layer.all_parts, strict=True)):
            wide, high = part.slot_slice.in_features, part.slot_slice.out_features
            a = torch.randn(rank, wide, device=self.device) / wide**0.5
            b = torch.randn(high, rank, device=self.device) / max(rank, 1) ** 0.5
            factors.append((a, b, scale + number) if rank else None)
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
        """The layer's output for a step of these runs; the head's rows are the same runs. `x` is whole."""
        self.punica.update_metadata(LoRAMapping(tuple(runs), tuple(runs)))
        return self.call(x)

    def call(self, x: Tensor) -> Tensor:
        """The layer's output under the metadata as it is."""
        return self._call(self.layer, x)

    def base(self, x: Tensor) -> Tensor:
        """What this rank's base layer says."""
        return self._call(self.layer.base_layer, x)

    def inputs(self, rows: int) -> Tensor:
        if isinstance(self.whole, VocabParallelEmbedding):
            return torch.randint(0, VOCAB, (rows,), device=self.device)
        return torch.randn(rows, HIDDEN, device=self.device)

    def expected(self, runs: Sequence[Run], x: Tensor) -> Tensor:
        """In float64, by each slot's dense matrix over the whole layer, from what was put and not from the
        stacked weights; then this rank's columns."""
        if isinstance(self.whole, layers.LogitsProcessor):
            y = self.whole.local(self.whole_head, x).double()
        else:
            y = _with_bias(self.whole(x)).double()
        rows = (nn.functional.one_hot(x, VOCAB) if x.dtype == torch.int64 else x).double()
        first = 0
        for slot, count in runs:
            if slot >= 0:
                y[first : first + count] += rows[first : first + count] @ self._dense(slot).T
            first += count
        return self._finished(y) if isinstance(self.whole, layers.LogitsProcessor) else self._own_columns(y)

    def _finished(self, y: Tensor) -> Tensor:
        whole = cast(layers.LogitsProcessor, self.whole)
        return whole.scale * (y if whole.soft_cap is None else whole.soft_cap * (y / whole.soft_cap).tanh())

    def _dense(self, slot: int) -> Tensor:
        parts = self.layer.all_parts
        factors = self.adapters.get(slot, [None] * len(parts))
        blocks = [
            f[2] * (f[1].double() @ f[0].double())
            if f
            else torch.zeros(part.slot_slice.out_features, part.slot_slice.in_features)
            .double()
            .to(self.device)
            for part, f in zip(parts, factors, strict=True)
        ]
        return torch.cat(blocks)

    def _own_columns(self, y: Tensor) -> Tensor:
        base = self.layer.base_layer
        gathered = isinstance(base, layers.ColumnParallelLinear) and base.gather_output
        return y[:, _own_rows(base)] if isinstance(base, LinearBase) and not gathered else y

    def _call(self, layer: nn.Module, x: Tensor) -> Tensor:
        base = self.layer.base_layer
        if isinstance(base, layers.LogitsProcessor):
            return layer(self.head, x)
        whole_input = isinstance(base, layers.RowParallelLinear) and not base.input_is_parallel
        cut = isinstance(base, LinearBase) and not whole_input
        return _with_bias(layer(x[:, _slice(base.input_range)] if cut else x))  # type: ignore[arg-type]


def make_rig(
    name: str,
    max_loras: int,
    max_rank: int,
    modules: frozenset[str] = EVERY_KIND,
    group: ParallelGroup = SINGLE,
    fully_sharded: bool = False,
    device: str = "cpu",
) -> Rig:
    """Draw the whole base from torch's generator: ranks that seed it alike have parts of one layer."""
    case = CASES[name]
    with torch.device(device):
        whole, whole_head = case.make_base(SINGLE), layers.ParallelLMHead(VOCAB, HIDDEN)
        base, head = case.make_base(group), layers.ParallelLMHead(VOCAB, HIDDEN, group)
    for parameter in (*whole.parameters(), *whole_head.parameters()):
        nn.init.normal_(parameter)
    take_share(whole, base)
    take_share(whole_head, head)
    config = LoRAConfig(max_loras, max_rank, modules, fully_sharded_loras=fully_sharded)
    layer = class_for(base, config, case.names, MODEL_CONFIG)(base, case.names)
    slices = [part.slot_slice for part in layer.served_parts(config, MODEL_CONFIG)]
    arena = SlotArena(SlotLayout.on_rank(slices, config, group), max_loras, device)
    layer.create_lora_weights(max_loras, config, MODEL_CONFIG, arena=arena)
    layer.set_mapping(punica := make_punica(max_loras, 64, device))
    return Rig(layer, whole, punica, head, whole_head, device)


def make_punica(max_loras: int, max_num_tokens: int, device: str) -> PunicaWrapperBase:
    if device == "cpu":
        return PunicaWrapperCPU(max_loras, max_num_tokens)
    from kernels.punica_gpu import PunicaWrapperGPU  # needs Triton, which the CPU's tests may lack

    return PunicaWrapperGPU(max_loras, max_num_tokens, device)


def take_share(whole: nn.Module, own: nn.Module) -> None:
    """Fill a rank's layer from the whole one."""
    if isinstance(own, LinearBase):
        own.weight.copy_(whole.weight[_own_rows(own), _slice(own.input_range)])  # type: ignore[index]
        if own.bias is not None:
            own.bias.copy_(whole.bias[_own_rows(own)])  # type: ignore[index]
    elif isinstance(own, VocabParallelEmbedding):
        own.weight[: len(own.vocab_range)].copy_(whole.weight[_slice(own.vocab_range)])  # type: ignore[index]


def _with_bias(output: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    return output[0] + output[1] if isinstance(output, tuple) else output


def _own_rows(layer: LinearBase) -> list[int]:
    """Numbers of the whole output's columns that this rank has, in its order."""
    starts = [sum(layer.output_sizes[:number]) for number in range(len(layer.output_sizes))]
    return [start + row for start, own in zip(starts, layer.output_ranges, strict=True) for row in own]


def _slice(own: range) -> slice:
    return slice(own.start, own.stop)
