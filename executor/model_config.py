from dataclasses import dataclass

from executor.layers.rotary import RopeScaling


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the decoder needs to know about a model; `executor.models.read_config` makes it from a folder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    windows: tuple[int | None, ...]  # by layer: a token sees itself and the window - 1 tokens before it
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over each head of q and k, before the rotation
    tied_head: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
