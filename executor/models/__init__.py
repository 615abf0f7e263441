"""From a Hugging Face folder to a model that can run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from executor.distributed import SINGLE, ParallelGroup
from executor.dummy import fill_with_noise
from executor.errors import UnsupportedModel
from executor.model_config import ModelConfig
from executor.models.config_file import read_config
from executor.models.decoder import CausalLM
from executor.weights import load_weights

__all__ = ["CausalLM", "check_splits", "load_model", "read_config"]


def load_model(
    path: Path,
    dtype: torch.dtype,
    device: torch.device | str,
    group: ParallelGroup = SINGLE,
    *,
    dummy: bool = False,
) -> CausalLM:
    """Reads config.json, generation_config.json and the safetensors of `path`; weights are cast to `dtype`,
    and cut for this rank of `group`. `dummy`: no safetensors, but random weights.

    Raises UnsupportedModel (names the field of config.json) or BadCheckpoint (names file and tensor).
    """
    config = read_config(path)
    check_splits(config, group.size)
    with _construction(dtype, device):
        model = CausalLM(config, group)
    if dummy:
        fill_with_noise(model)
    else:
        load_weights(model, path, model.packed_modules_mapping)
    return model


def check_splits(config: ModelConfig, size: int) -> None:
    """Raises UnsupportedModel, naming the sizes that would do, when `size` ranks cannot share this model."""
    if not _splits(config, size):
        possible = [str(n) for n in range(1, config.num_heads + 1) if _splits(config, n)]
        raise UnsupportedModel(
            f"--tensor-parallel-size {size} does not cut this model ({config.num_heads} query heads, "
            f"{config.num_kv_heads} KV heads, intermediate_size {config.intermediate_size}): "
            f"possible are {', '.join(possible)}"
        )


def _splits(config: ModelConfig, size: int) -> bool:
    heads = config.num_heads % size == 0
    kv_heads = config.num_kv_heads % size == 0 or size % config.num_kv_heads == 0
    tokens = -(-config.vocab_size // size) * (size - 1) < config.vocab_size
    return heads and kv_heads and tokens and config.intermediate_size % size == 0


@contextmanager
def _construction(dtype: torch.dtype, device: torch.device | str) -> Iterator[None]:
    """Layers take torch's defaults, which saves every constructor two arguments. The dtype is global to the
    process while this lasts: models load before anything else runs."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(previous)
