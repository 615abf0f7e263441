"""The way from a Hugging Face folder to a model that runs: its config, weights and decoder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from adapter_store.base.config import BaseConfig
from executor.distributed import SINGLE, ParallelGroup
from executor.errors import UnsupportedModel
from executor.layers.model_config import ModelConfig
from executor.models.config_file import read_config
from executor.models.decoder import CausalLM
from executor.models.dummy import fill_with_noise
from executor.models.quantization import read_quantization
from executor.models.weights import load_weights

__all__ = ["CausalLM", "check_splits", "construction", "load_model", "read_config"]


def load_model(
    path: Path,
    dtype: torch.dtype,
    device: torch.device | str,
    group: ParallelGroup = SINGLE,
    *,
    dummy: bool = False,
    expert_parallel: bool = False,
) -> CausalLM:
    """Reads config.json, generation_config.json and the safetensors of `path`; weights are cast to `dtype`,
    and cut for this rank of `group`. `dummy`: no safetensors, but random weights.
    `expert_parallel`: ranks share experts out instead of cutting each.

    Raises InvalidModel (names the file and the field or tensor), UnsupportedModel (names the field) or
    BadCheckpoint (names file and tensor).
    """
    config = read_config(path, expert_parallel=expert_parallel)
    check_splits(config, group.size)
    with construction(dtype, device):
        model = CausalLM(config, group)
    if dummy:
        fill_with_noise(model)
    else:
        scheme = read_quantization(BaseConfig.from_folder(path).fields)
        load_weights(model, path, model.packed_modules_mapping, scheme)
    return model


def check_splits(config: ModelConfig, size: int) -> None:
    """Raises UnsupportedModel, naming the sizes that would do, when `size` ranks cannot share this model."""
    if not _splits(config, size):
        possible = [str(n) for n in range(1, config.num_heads + 1) if _splits(config, n)]
        raise UnsupportedModel(
            f"--tensor-parallel-size {size} does not cut this model ({config.num_heads} query heads, "
            f"{config.num_kv_heads} KV heads, intermediate_size {config.intermediate_size}"
            f"{_experts(config)}): possible are {', '.join(possible)}"
        )


def _splits(config: ModelConfig, size: int) -> bool:
    heads = config.num_heads % size == 0
    kv_heads = config.num_kv_heads % size == 0 or size % config.num_kv_heads == 0
    tokens = -(-config.vocab_size // size) * (size - 1) < config.vocab_size
    return heads and kv_heads and tokens and all(width % size == 0 for width in _cut_widths(config))


def _cut_widths(config: ModelConfig) -> list[int]:
    """What else than heads and tokens is shared out evenly."""
    moe = config.moe
    if moe is None:
        return [config.intermediate_size]
    widths = [moe.num_experts if moe.expert_parallel else moe.intermediate_size]
    if moe.shared_intermediate_size:
        widths.append(moe.shared_intermediate_size)
    return widths if all(moe.layers) else [*widths, config.intermediate_size]


def _experts(config: ModelConfig) -> str:
    moe = config.moe
    return f", {moe.num_experts} experts of {moe.intermediate_size}" if moe else ""


@contextmanager
def construction(dtype: torch.dtype, device: torch.device | str) -> Iterator[None]:
    """Layers take torch's defaults, which saves every constructor two arguments. The dtype is global to the
    process while this lasts: models load before anything else runs."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(previous)
