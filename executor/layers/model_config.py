"""What the decoder needs to know about a model: sizes, windows, biases, rotation, experts."""

from dataclasses import dataclass

from executor.layers.activation import Activation
from executor.layers.norm import NormKind
from executor.layers.rotary import RopeScaling


@dataclass(frozen=True, slots=True)
class SwiGLULimits:
    """Parameters of gpt-oss's activation: executor.layers.activation.ClampedSwiGLU."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """The experts of a mixture-of-experts model, the same in every layer that has any."""

    layers: tuple[bool, ...]  # which decoder layers have experts; the others have a plain MLP
    num_experts: int
    top_k: int
    intermediate_size: int  # of one expert
    renormalize: bool  # the weights of a token's experts add up to 1
    shared_intermediate_size: int | None = None  # of the expert that every token has beside its own
    biases: bool = False  # on the router and in the experts
    # One matrix for gate and up, with their rows taking turns, in checkpoint and adapters alike.
    interleaved: bool = False
    clamped: SwiGLULimits | None = None  # None: silu(gate) * up
    gated: bool = True  # False: an expert has up and down alone, with relu(up)^2 between them
    expert_parallel: bool = False  # ranks share the experts out instead of cutting each of them

    def __post_init__(self) -> None:
        if not self.gated and (self.interleaved or self.clamped):
            raise ValueError("experts without a gate have nothing to interleave, nor a clamped SwiGLU")


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Constants that a family multiplies with; all are above 0."""

    embedding: float = 1.0  # of the embedding's rows
    residual: float = 1.0  # of what each attention and each MLP adds
    scores: float | None = None  # of q k^T, in place of 1 / sqrt(head_dim)
    logits: float = 1.0
    embedding_rounded: bool = False  # to the model's dtype, before it multiplies


@dataclass(frozen=True, slots=True)
class SoftCaps:
    """What x may reach at most where it becomes cap * tanh(x / cap); None: it stays x."""

    scores: float | None = None  # of q k^T, before what is not visible is masked
    logits: float | None = None


@dataclass(frozen=True, slots=True)
class Rope:
    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class NormNames:
    """The norms of a layer, as its checkpoint calls them; None: it has none there. Those before normalise
    what attention and MLP read, those after what they add."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


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
    qk_norm: bool  # a norm over each head of q and k, before the rotation
    tied_head: bool
    eos_token_ids: tuple[int, ...]
    attention_sinks: bool = False  # a learned logit a head that takes part in the softmax and has no value
    moe: MoEConfig | None = None
    unrotated: frozenset[int] = frozenset()  # layers that turn neither q nor k
    multipliers: Multipliers = Multipliers()
    norms: NormNames = NormNames()
    # What the checkpoint has in one matrix: qkv_proj for q, k and v, gate_up_proj for gate and up.
    fused_projections: frozenset[str] = frozenset()
    qk_norm_whole: bool = False  # with qk_norm: over all heads of q, and of k, together
    activation: Activation = "silu"
    norm: NormKind = "rms"
    soft_caps: SoftCaps = SoftCaps()
    window_rope: Rope | None = None  # of layers with a window; None: they turn as the others
    turned_dims: int | None = None  # the first so many of each head are turned; None: all
    gated: bool = True  # False: an MLP has two projections, and gelu between them
    parallel: bool = False  # attention and MLP read the same norm, and both are added
    interleaved: bool = False  # they are turned in the planes (2 * i, 2 * i + 1), not (i, i + dims / 2)

    def __post_init__(self) -> None:
        if self.soft_caps.scores is not None and self.attention_sinks:
            raise ValueError("no attention caps scores and has sinks, too")
        if self.moe is not None and self.activation != "silu":
            raise ValueError(f"experts have silu, not {self.activation}")
        if self.turned_dims is not None and self.multipliers.scores is not None:
            raise ValueError("a multiplier of scores is in the rotation, which must turn heads whole then")

    @property
    def residual_eps(self) -> float:
        """For the norms of what layers add up, which is kept divided by its multiplier: they undo that."""
        return self.rms_norm_eps / self.multipliers.residual**2
