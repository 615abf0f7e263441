"""Names of modules in the packed form, which stores, scheduler and executors share.

"layers.3.q_proj", "layers.3.shared_expert.up_proj", "layers.3.router", "layers.3.experts.w2", "embed_tokens".
The experts' matrices are w1 (gate), w2 (down), w3 (up), and w13 where an adapter has one pair for gate and up.
"""

EXPERTS = "experts"
EXPERT_MATRICES = ("w1", "w3", "w13", "w2")


def kind_of(module: str) -> str:
    """What a slot holds or not: the last part of the name, and "experts" for all matrices of experts."""
    return EXPERTS if is_expert(module) else module.rpartition(".")[2]


def is_expert(module: str) -> bool:
    return ".experts." in module


def layer_of(module: str) -> int | None:
    return int(module.split(".")[1]) if module.startswith("layers.") else None
