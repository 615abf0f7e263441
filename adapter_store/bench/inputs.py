"""An 84 MB adapter: rank 16 on the seven projections of Llama-3.1-8B's 32 layers, in bfloat16."""

import json
from pathlib import Path

import numpy as np

from adapter_store.model_spec import ModelSpec, module_path
from adapter_store.peft.config import CONFIG_FILE
from adapter_store.peft.folder import WEIGHTS_FILE

RANK = 16
SPEC = ModelSpec(
    fingerprint="0" * 64,
    architecture="LlamaForCausalLM",
    num_layers=32,
    vocab_size=128256,
    tied_head=False,
    hidden_size=4096,
    modules={
        "q_proj": (4096, 4096),
        "k_proj": (4096, 1024),
        "v_proj": (4096, 1024),
        "o_proj": (4096, 4096),
        "gate_proj": (4096, 14336),
        "up_proj": (4096, 14336),
        "down_proj": (14336, 4096),
        "embed_tokens": (128256, 4096),
        "lm_head": (4096, 128256),
    },
    max_model_len=131072,
    name="Llama-3.1-8B",
)


def write_adapter(folder: Path, seed: int) -> int:
    """Writes an adapter as PEFT would, with random values. Returns the bytes of its weights."""
    folder.mkdir()
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "base_model_name_or_path": SPEC.name}
    (folder / CONFIG_FILE).write_text(json.dumps(fields))
    chance, shapes = np.random.default_rng(seed), _shapes()
    sizes = {name: 2 * rows * columns for name, (rows, columns) in shapes.items()}
    entries, offset = {}, 0
    for name, (rows, columns) in shapes.items():
        span = [offset, offset + sizes[name]]
        entries[name] = {"dtype": "BF16", "shape": [rows, columns], "data_offsets": span}
        offset = span[1]
    header = json.dumps(entries).encode()
    with (folder / WEIGHTS_FILE).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for size in sizes.values():
            # Any bits but the exponent's highest: values below 2, of either sign.
            bits = chance.integers(0, 1 << 16, size // 2, np.uint16) & np.uint16(0xBFFF)
            file.write(bits.tobytes())
    return offset


def _shapes() -> dict[str, tuple[int, int]]:
    shapes = {}
    for layer in range(SPEC.num_layers):
        for kind, (in_features, out_features) in SPEC.modules.items():
            if kind in ("embed_tokens", "lm_head"):
                continue
            name = f"base_model.model.{module_path(f'layers.{layer}.{kind}')}"
            shapes[f"{name}.lora_A.weight"] = (RANK, in_features)
            shapes[f"{name}.lora_B.weight"] = (out_features, RANK)
    return shapes
