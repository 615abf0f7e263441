"""From a Hugging Face folder to a model that can run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from executor.models.config_file import read_config
from executor.models.decoder import CausalLM
from executor.weights import load_weights

__all__ = ["CausalLM", "load_model", "read_config"]


def load_model(path: Path, dtype: torch.dtype, device: torch.device | str) -> CausalLM:
    """Reads config.json, generation_config.json and the safetensors of `path`; weights are cast to `dtype`.

    Raises UnsupportedModel (names the field of config.json) or BadCheckpoint (names file and tensor).
    """
    config = read_config(path)
    with _construction(dtype, device):
        model = CausalLM(config)
    load_weights(model, path, model.packed_modules_mapping)
    return model


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
