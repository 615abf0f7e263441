"""What every form becomes: tensors under PEFT's names, and the config that PEFT would have written."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from adapter_store.errors import InvalidAdapter
from adapter_store.files.safetensors_file import NUMPY_DTYPES, DamagedFile, TensorFile
from adapter_store.peft.config import CONFIG_FILE
from adapter_store.peft.folder import WEIGHTS_FILE

Array = NDArray[Any]


@dataclass(frozen=True)
class Pair:
    """One module's LoRA as PEFT has it: A [r, in], B [out, r]; with DoRA the magnitude [out]."""

    a: Array
    b: Array
    magnitude: Array | None = None


@dataclass(frozen=True)
class PeftForm:
    tensors: Mapping[str, Array]
    config: Mapping[str, Any] | None = None  # None: the folder's own is PEFT's already

    @classmethod
    def of_pairs(
        cls, pairs: Mapping[str, Pair], rank: int, scale: float, base_model: str | None
    ) -> "PeftForm":
        """`pairs` by the module's path, as "model.layers.0.self_attn.q_proj"; `scale` is what B A x is
        multiplied by. Raises InvalidAdapter for a pair of another rank, or when only some have a magnitude.
        """
        tensors: dict[str, Array] = {}
        dora = any(pair.magnitude is not None for pair in pairs.values())
        for module, pair in pairs.items():
            if pair.a.shape[0] != rank or pair.b.shape[1] != rank:
                ranks = f"{pair.a.shape[0]} and {pair.b.shape[1]}"
                raise InvalidAdapter(f"the pair of {module} has the ranks {ranks}, the config says {rank}")
            if dora and pair.magnitude is None:
                raise InvalidAdapter(f"{module} has no magnitude, which other modules have (DoRA)")
            tensors[f"base_model.model.{module}.lora_A.weight"] = pair.a
            tensors[f"base_model.model.{module}.lora_B.weight"] = pair.b
            if pair.magnitude is not None:
                tensors[f"base_model.model.{module}.lora_magnitude_vector"] = pair.magnitude
        alpha = scale * rank
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": rank,
            "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
            "use_dora": dora,
            "target_modules": sorted({_target(module) for module in pairs}),
            "bias": "none",
            "init_lora_weights": True,
            "inference_mode": True,
        }
        return cls(tensors, config)

    def write(self, folder: Path) -> None:
        if self.config is not None:
            (folder / CONFIG_FILE).write_text(json.dumps(self.config, indent=2))
        with (folder / WEIGHTS_FILE).open("wb") as file:
            _write_safetensors(self.tensors, file)


def _target(module: str) -> str:
    """Exactly this module; of experts the last part, by which PEFT finds them in newer models."""
    return module.rpartition(".")[2] if ".experts." in module else module


def open_tensors(path: Path) -> TensorFile:
    """Raises InvalidAdapter, also for tensors of another type than adapters have."""
    try:
        file = TensorFile.open(path)
    except (DamagedFile, OSError) as error:
        raise InvalidAdapter(str(error)) from error
    for tensor in file:
        if tensor.dtype not in NUMPY_DTYPES:
            raise InvalidAdapter(f"tensor {tensor.name!r} has dtype {tensor.dtype}, not F32, F16 or BF16")
    return file


def positive_integer(file: str, field: str, value: object) -> int:
    """Raises InvalidAdapter."""
    if type(value) is not int or value < 1:
        raise InvalidAdapter(f"{file}: {field} is {value!r}, not a positive integer")
    return value


def scale_factor(file: str, field: str, value: object) -> float:
    """Raises InvalidAdapter."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not value:
        raise InvalidAdapter(f"{file}: {field} is {value!r}, not a finite number other than 0")
    return float(value)


def _write_safetensors(tensors: Mapping[str, Array], file: BinaryIO) -> None:
    names = {dtype: name for name, dtype in NUMPY_DTYPES.items()}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in tensors.items():
        end = offset + array.nbytes
        entries[name] = {"dtype": names[array.dtype], "shape": array.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for array in tensors.values():
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
