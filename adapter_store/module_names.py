"""Names of modules in the packed form, which stores, scheduler and executors share.

"layers.3.q_proj", "layers.3.shared_expert.up_proj", "layers.3.router", "layers.3.experts.w2", "lm_head". The
experts' matrices are w1 (gate), w2 (down), w3 (up), and w13 where an adapter has one pair for gate and up.
"""

EXPERTS = "experts"
# What a name has behind "layers.3.", in the order of the forward pass, and where transformers keeps it.
PATHS_IN_LAYER = {
    **{place: f"self_attn.{place}" for place in ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")},
    **{
        place: f"mlp.{place}"
        for place in ("gate_proj", "up_proj", "gate_up_proj", "down_proj", "c_fc", "c_proj")
    },
    "router": "mlp.gate",
    "experts.w1": "mlp.experts.gate_proj",
    "experts.w3": "mlp.experts.up_proj",
    "experts.w13": "mlp.experts.gate_up_proj",
    "experts.w2": "mlp.experts.down_proj",
    **{
        f"shared_expert.{name}": f"mlp.shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")
    },
    "shared_expert_gate": "mlp.shared_expert_gate",
}
# The projections of a layer without experts: what adapters are on by default.
DENSE_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Projections that some checkpoints have in one matrix, and what it is in place of.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_ORDER = ("embed_tokens", *PATHS_IN_LAYER, "lm_head")


def kind_of(module: str) -> str:
    """What a slot holds or not: the last part of the name, and "experts" for all matrices of experts."""
    return EXPERTS if is_expert(module) else module.rpartition(".")[2]


def is_expert(module: str) -> bool:
    return ".experts." in module


def layer_of(module: str) -> int | None:
    return int(module.split(".")[1]) if module.startswith("layers.") else None


def place_of(module: str) -> str:
    """The name without its layer: "experts.w2", "q_proj", "lm_head"."""
    return module.split(".", 2)[2] if module.startswith("layers.") else module


def in_model_order(module: str) -> tuple[int, int]:
    """A key to sort by: the layer, then the order of the forward pass."""
    layer, place = layer_of(module), place_of(module)
    outside = -1 if place == "embed_tokens" else 1 << 30
    return (outside if layer is None else layer), _ORDER.index(place)
