"""The one decoder behind all families: pre-norm blocks, grouped-query attention with rotation, gated MLP.

Module names follow the checkpoints, but for what `packed_modules_mapping` joins.
"""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from executor.attention import attend
from executor.distributed import SINGLE, ParallelGroup
from executor.forward import ForwardContext
from executor.layers import (
    LogitsProcessor,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    SiluAndMul,
    VocabParallelEmbedding,
    apply_rotary,
)
from executor.layers.attention_sinks import AttentionSinks
from executor.model_config import ModelConfig
from executor.models.moe import MoEBlock


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer_index: int, group: ParallelGroup) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads, config.qkv_bias, group
        )
        self.split_sizes = list(self.qkv_proj.output_partition_sizes)
        q_size = config.num_heads * config.head_dim
        self.o_proj = RowParallelLinear(q_size, config.hidden_size, config.o_bias, group)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.sinks = AttentionSinks(config.num_heads, group) if config.attention_sinks else None

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], ctx: ForwardContext) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim))  # [rows, heads, head_dim]
            for part in self.qkv_proj(hidden).split(self.split_sizes, dim=-1)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary(q, *rotation), apply_rotary(k, *rotation)
        sinks = self.sinks.weight if self.sinks else None
        y = attend(q, k, v, ctx.kv_cache.layers[self.layer_index], ctx.attention, sinks)
        out: Tensor = self.o_proj(y.flatten(1))
        return out


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, group: ParallelGroup) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(hidden, (wide, wide), config.mlp_bias, group)
        self.act_fn = SiluAndMul()
        self.down_proj = RowParallelLinear(wide, hidden, config.mlp_bias, group)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.gate_up_proj(hidden)))
        return out


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer_index: int, group: ParallelGroup) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer_index, group)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        experts = config.moe if config.moe and config.moe.layers[layer_index] else None
        self.mlp = MoEBlock(config.hidden_size, experts, group) if experts else MLP(config, group)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], ctx: ForwardContext) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, ctx)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig, group: ParallelGroup) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, group)
        self.layers = nn.ModuleList(DecoderLayer(config, i, group) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config.head_dim, config.rope_theta, config.rope_scaling)

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        hidden = self.embed_tokens(token_ids)
        rotation = self.rotary_emb(ctx.positions, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, rotation, ctx)
        out: Tensor = self.norm(hidden)
        return out


class CausalLM(nn.Module):
    """A decoder with its head. Parameters take torch's default dtype and device at construction, are
    uninitialised, and need no gradient. Each rank of `group` has its part, and all run every step together;
    ValueError when they cannot share this model."""

    packed_modules_mapping: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    def __init__(self, config: ModelConfig, group: ParallelGroup = SINGLE) -> None:
        super().__init__()
        self.config = config
        self.group = group
        self.model = Decoder(config, group)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, group)
        if config.tied_head:
            self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size, group)

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """token_ids [rows] -> hidden [rows, hidden_size]; writes the rows' keys and values into the cache."""
        out: Tensor = self.model(token_ids, ctx)
        return out

    def compute_logits(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """`hidden` is all rows, as from `forward`. Returns float32 [n, vocab], for the n ctx.logits_rows."""
        if len(hidden) != len(ctx.positions):
            raise ValueError(f"hidden has {len(hidden)} rows, but the step has {len(ctx.positions)}")
        out: Tensor = self.logits_processor(self.lm_head, hidden[ctx.logits_rows])
        return out
