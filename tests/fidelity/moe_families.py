"""One tiny base of every family with experts, and adapters that together touch all that a slot holds."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.fidelity.conftest import Stream
from tests.support.adapters.moe_models import (
    ATTENTION,
    EXPERTS,
    load_moe_base,
    make_moe_adapter,
    make_moe_base,
)

ADAPTERS: Mapping[str, Mapping[str, Any]] = {
    "attention": {"rank": 4, "modules": ATTENTION},
    "experts": {"rank": 2, "parameters": EXPERTS},
    "both-rslora": {"rank": 3, "use_rslora": True, "modules": ["q_proj", "v_proj"], "parameters": EXPERTS},
    "down": {"rank": 5, "alpha": 10, "parameters": ["down_proj"]},
    "gate-up": {"rank": 1, "alpha": 2, "parameters": ["gate_up_proj"]},
}
ALL_LINEAR = {"rank": 2, "modules": "all-linear"}
SHARED = [f"shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")]
MORE: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "mixtral": {"all-linear": ALL_LINEAR},
    "qwen2-moe": {
        "all-linear": ALL_LINEAR,
        "shared": {"rank": 3, "parameters": SHARED, "modules": ["shared_expert_gate"]},
    },
    "qwen3-moe": {"all-linear": ALL_LINEAR},
    "gpt-oss": {"router": {"rank": 2, "modules": ["o_proj"], "parameters": ["router.weight", *EXPERTS]}},
}
# Layers of another kind and settings that the family's larger models have.
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "mixtral": {"sliding_window": 16},
    "qwen2-moe": {},
    "qwen3-moe": {"num_hidden_layers": 3, "mlp_only_layers": [1]},
    "gpt-oss": {},
}
KINDS = {
    "mixtral": ("experts", "router"),
    "qwen2-moe": ("experts", "router", "shared_expert_gate", "gate_proj", "up_proj", "down_proj"),
    "qwen3-moe": ("experts", "router", "gate_proj", "up_proj", "down_proj"),
    "gpt-oss": ("experts", "router"),
}
# Chosen so that no answer comes near a tie.
PROMPT_SEEDS = {"mixtral": 2, "qwen2-moe": 2, "qwen3-moe": 1, "gpt-oss": 1}
PROMPT_TOKENS = 24


def make_moe_family(family: str, folder: Path, names: tuple[str, ...] = ()) -> tuple[Path, list[Stream]]:
    """The base's folder, and a prompt for the base and for each adapter (or only the named ones)."""
    model = make_moe_base(folder / "model", family, **OVERRIDES[family])
    base = load_moe_base(model)
    adapters = {**ADAPTERS, **MORE[family]}
    draw = random.Random(PROMPT_SEEDS[family])
    prompts = {
        name: tuple(draw.randrange(3, 128) for _ in range(PROMPT_TOKENS)) for name in ("base", *adapters)
    }
    streams = []
    for name in ("base", *(names or adapters)):
        adapter = None
        if name in adapters:
            adapter = make_moe_adapter(folder / name, base, seed=5, **adapters[name])
        streams.append(Stream(name, adapter, prompts[name]))
    return model, streams
