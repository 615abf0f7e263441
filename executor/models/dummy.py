"""`--load-format dummy`: random weights in a model's shapes, for speed runs without a checkpoint."""

import hashlib
from pathlib import Path

import torch
from torch import nn

from adapter_store import ModelSpec
from executor.layers import RMSNorm
from executor.layers.model_config import ModelConfig

# As models are initialised: activations stay finite through any number of layers.
_SPREAD = 0.02


def fill_with_noise(model: nn.Module) -> None:
    """Equal for equal models on one kind of device."""
    for number, module in enumerate(model.modules()):
        for parameter in module.parameters(recurse=False):
            generator = torch.Generator(parameter.device).manual_seed(number)
            if isinstance(module, RMSNorm):
                parameter.data.fill_(1.0)
            else:
                parameter.data.normal_(0.0, _SPREAD, generator=generator)


def spec_without_checkpoint(folder: Path, config: ModelConfig) -> ModelSpec:
    """For a folder with a config.json alone. No scheduler has its fingerprint: they read checkpoints."""
    text = (folder / "config.json").read_bytes()
    return ModelSpec(
        fingerprint=hashlib.sha256(b"random weights of " + text).hexdigest(),
        architecture=config.architecture,
        num_layers=config.num_layers,
        vocab_size=config.vocab_size,
        tied_head=config.tied_head,
        hidden_size=config.hidden_size,
        modules=_modules(config),
        max_model_len=config.max_position_embeddings,
        name=folder.resolve().name,
        folder=folder.resolve(),
    )


def _modules(config: ModelConfig) -> dict[str, tuple[int, int]]:
    hidden, wide, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    query, key_value = (heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads))
    return {
        "q_proj": (hidden, query),
        "k_proj": (hidden, key_value),
        "v_proj": (hidden, key_value),
        "o_proj": (query, hidden),
        "gate_proj": (hidden, wide),
        "up_proj": (hidden, wide),
        "down_proj": (wide, hidden),
        "embed_tokens": (vocab, hidden),
        "lm_head": (hidden, vocab),
    }
