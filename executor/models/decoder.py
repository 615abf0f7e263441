"""The one decoder behind all families: attention with rotation, gated MLP, and norms around both.

Module names follow the checkpoints, but for what `packed_modules_mapping` joins.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from adapter_store.module_names import FUSED
from executor.distributed import SINGLE, ParallelGroup
from executor.layers import (
    ColumnParallelLinear,
    LogitsProcessor,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from executor.layers.attention_sinks import AttentionSinks
from executor.layers.context import ForwardContext
from executor.layers.followers import Follower, Heads, Rotation
from executor.layers.linear import kv_head_share
from executor.layers.model_config import ModelConfig, Multipliers, Rope
from executor.layers.norm import HeadsRMSNorm, Norm, make_norm
from executor.models.moe import MoEBlock


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer_index: int, group: ParallelGroup) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads, config.qkv_bias, group
        )
        q_size = config.num_heads * config.head_dim
        self.o_proj = RowParallelLinear(q_size, config.hidden_size, config.o_bias, group)
        q_heads, kv_heads = group.share(config.num_heads), kv_head_share(config.num_kv_heads, group)
        self.q_norm = _head_norm(config, config.num_heads, q_heads, group)
        self.k_norm = _head_norm(config, config.num_kv_heads, kv_heads, group)
        self.sinks = AttentionSinks(config.num_heads, group) if config.attention_sinks else None
        q, k, v = self.qkv_proj.output_partition_sizes
        self.heads = Heads((q, k, v), config.head_dim, self.q_norm, self.k_norm, config.interleaved)

    def forward(self, hidden: Tensor, rotation: Rotation, ctx: ForwardContext, then: Follower) -> Tensor:
        cache = ctx.kv_cache.layers[self.layer_index]
        rotate = ctx.followers.rotate(self.heads, rotation, cache.data, ctx.attention.kv_slots)
        sinks = self.sinks.weight if self.sinks else None
        y = ctx.attention.attend(self.qkv_proj.followed_by(hidden, rotate), cache, sinks)
        return self.o_proj.followed_by(y.flatten(1), then)


def _head_norm(config: ModelConfig, heads: int, own: range, group: ParallelGroup) -> Norm | None:
    if not config.qk_norm:
        return None
    if config.qk_norm_whole:
        return HeadsRMSNorm(heads, config.head_dim, config.rms_norm_eps, own, group)
    return make_norm(config.norm, config.head_dim, config.rms_norm_eps)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, group: ParallelGroup) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(hidden, (wide, wide), config.mlp_bias, group)
        self.down_proj = RowParallelLinear(wide, hidden, config.mlp_bias, group)
        self.activation = config.activation

    def forward(self, hidden: Tensor, ctx: ForwardContext, then: Follower) -> Tensor:
        inner = self.gate_up_proj.followed_by(hidden, ctx.followers.gated(self.activation))
        return self.down_proj.followed_by(inner, then)


class PlainMLP(nn.Module):
    """Without a gate."""

    def __init__(self, config: ModelConfig, group: ParallelGroup) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.intermediate_size
        self.c_fc = ColumnParallelLinear(hidden, wide, config.mlp_bias, group)
        self.c_proj = RowParallelLinear(wide, hidden, config.mlp_bias, group)

    def forward(self, hidden: Tensor, ctx: ForwardContext, then: Follower) -> Tensor:
        return self.c_proj.followed_by(self.c_fc.followed_by(hidden, ctx.followers.gelu()), then)


def _mlp(config: ModelConfig, layer_index: int, group: ParallelGroup) -> nn.Module:
    if config.moe and config.moe.layers[layer_index]:
        return MoEBlock(config.hidden_size, config.moe, group)
    return MLP(config, group) if config.gated else PlainMLP(config, group)


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """A layer's norms by their places, which `NormNames` explains."""

    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer_index: int, group: ParallelGroup) -> None:
        super().__init__()
        names = config.norms
        before_attention = self._norm(names.before_attention, config, config.residual_eps)
        self.self_attn = Attention(config, layer_index, group)
        after_attention = self._norm(names.after_attention, config, config.rms_norm_eps)
        before_mlp = self._norm(names.before_mlp, config, config.residual_eps)
        self.mlp = _mlp(config, layer_index, group)
        after_mlp = self._norm(names.after_mlp, config, config.rms_norm_eps)
        self.norms = LayerNorms(before_attention, after_attention, before_mlp, after_mlp)
        self.parallel = config.parallel

    def _norm(self, name: str | None, config: ModelConfig, eps: float) -> Norm | None:
        """A module of this layer, under the name that its checkpoint has for it."""
        if name is None:
            return None
        norm = make_norm(config.norm, config.hidden_size, eps)
        self.add_module(name, norm)
        return norm

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor,
        rotation: Rotation,
        ctx: ForwardContext,
        next_norm: Norm | None,
    ) -> Tensor:
        """`hidden` is normed for this layer, the result by `next_norm`; `residual` is changed in place."""
        add_norm, norms = ctx.followers.add_norm, self.norms
        if self.parallel:
            self.self_attn(hidden, rotation, ctx, add_norm(residual, None))
            return cast(Tensor, self.mlp(hidden, ctx, add_norm(residual, next_norm)))
        then = add_norm(residual, norms.before_mlp, norms.after_attention)
        hidden = self.self_attn(hidden, rotation, ctx, then)
        out: Tensor = self.mlp(hidden, ctx, add_norm(residual, next_norm, norms.after_mlp))
        return out


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig, group: ParallelGroup) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, group)
        self.layers = nn.ModuleList(DecoderLayer(config, i, group) for i in range(config.num_layers))
        self.norm = make_norm(config.norm, config.hidden_size, config.residual_eps)
        self.rotary_emb = _rotary(config, Rope(config.rope_theta, config.rope_scaling))
        self.window_rotary_emb = _rotary(config, config.window_rope) if config.window_rope else None
        # Before each layer, and after the last.
        layers = [cast(DecoderLayer, layer) for layer in self.layers]
        self.norms = [*(layer.norms.before_attention for layer in layers), self.norm]
        self.unrotated = config.unrotated
        self.windows = config.windows
        self.embedding_factor = self._embedding_factor(config.multipliers)

    def _embedding_factor(self, multipliers: Multipliers) -> float:
        factor = multipliers.embedding / multipliers.residual
        if not multipliers.embedding_rounded:
            return factor
        return torch.tensor(factor, dtype=self.embed_tokens.weight.dtype, device="cpu").item()

    def forward(self, token_ids: Tensor, ctx: ForwardContext, layers: Sequence[int] | None = None) -> Tensor:
        embedded: Tensor = self.embed_tokens(token_ids)
        if self.embedding_factor != 1.0:
            embedded = embedded * self.embedding_factor
        residual = torch.zeros_like(embedded)
        hidden = ctx.followers.add_norm(residual, self.norms[0]).plain(embedded)
        rotations = self._rotations(ctx, embedded.dtype)
        steps = list(zip(self.layers, rotations, self.norms[1:], strict=True))
        for layer, rotation, next_norm in steps if layers is None else (steps[number] for number in layers):
            hidden = layer(hidden, residual, rotation, ctx, next_norm)
        return hidden

    def _rotations(self, ctx: ForwardContext, dtype: torch.dtype) -> list[Rotation]:
        """One a layer, computed once a step."""
        rotation = ctx.followers.rotation(self.rotary_emb, ctx.positions, dtype)
        if self.window_rotary_emb is not None:
            narrow = ctx.followers.rotation(self.window_rotary_emb, ctx.positions, dtype)
            return [rotation if window is None else narrow for window in self.windows]
        if not self.unrotated:
            return [rotation] * len(self.layers)
        unturned = self.rotary_emb.unturned(rotation)
        return [unturned if number in self.unrotated else rotation for number in range(len(self.layers))]


def _rotary(config: ModelConfig, rope: Rope) -> RotaryEmbedding:
    head_dim, scores = config.head_dim, config.multipliers.scores
    # Of q and k each, so that every form of attention divides by sqrt(head_dim) as ever.
    length = 1.0 if scores is None else math.sqrt(scores * math.sqrt(head_dim))
    turned, interleaved = config.turned_dims, config.interleaved
    return RotaryEmbedding(head_dim, rope.theta, rope.scaling, length, dims=turned, interleaved=interleaved)


class CausalLM(nn.Module):
    """A decoder with its head. Parameters take torch's default dtype and device at construction, are
    uninitialised, and need no gradient. Each rank of `group` has its part, and all run every step together;
    ValueError when they cannot share this model."""

    def __init__(self, config: ModelConfig, group: ParallelGroup = SINGLE) -> None:
        super().__init__()
        self.config = config
        self.group = group
        self.packed_modules_mapping: Mapping[str, tuple[str, ...]] = {
            name: parts for name, parts in FUSED.items() if name not in config.fused_projections
        }
        self.model = Decoder(config, group)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, group)
        if config.tied_head:
            self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(
            config.vocab_size, group, scale=config.multipliers.logits, soft_cap=config.soft_caps.logits
        )

    def forward(self, token_ids: Tensor, ctx: ForwardContext, layers: Sequence[int] | None = None) -> Tensor:
        """token_ids [rows] -> hidden [rows, hidden_size]; writes the rows' keys and values into the cache.
        `layers`: through these alone, whose kernels are to run once; the result means nothing then."""
        out: Tensor = self.model(token_ids, ctx, layers)
        return out

    def compute_logits(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """`hidden` is all rows, as from `forward`. Returns float32 [n, vocab], for the n ctx.logits_rows."""
        if len(hidden) != len(ctx.positions):
            raise ValueError(f"hidden has {len(hidden)} rows, but the step has {len(ctx.positions)}")
        return self.head(hidden[ctx.logits_rows])

    def head(self, hidden: Tensor) -> Tensor:
        """`hidden` [n, hidden_size]: of the n rows that the step's metadata says reach the head."""
        out: Tensor = self.logits_processor(self.lm_head, hidden)
        return out
