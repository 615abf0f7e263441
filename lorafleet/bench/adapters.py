"""Random adapters by the dozen, as PEFT folders: fast to write, each with its own content."""

import json
import struct
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from lorafleet.adapters import Adapters
from lorafleet.bench.errors import BenchError

if TYPE_CHECKING:
    from adapter_store import ModelSpec

_ATTENTION = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_DENSE = (*_MLP[:2], "gate_up_proj", _MLP[2])
# Where a layer's experts are, and the names of their three, where both are not as elsewhere.
_EXPERTS = {"MixtralForCausalLM": ("block_sparse_moe", ("w1", "w3", "w2"))}
# What Random makes at once: its bits are counted in 32 of them. Whole words, so that pieces are as the whole.
_RANDOM_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes of a base model: its layers, and (in_features, out_features) of each projection by its path
    in a layer, as "self_attn.q_proj" or "mlp.experts.7.up_proj"."""

    num_layers: int
    projections: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, model: Path, *, attention_only: bool = False) -> "Shapes":
        """From config.json of a Hugging Face folder, as the services read it. Raises BenchError."""
        spec = _spec_of(model)
        projections = {f"self_attn.{name}": spec.modules[name] for name in _ATTENTION if name in spec.modules}
        if attention_only:
            return cls(spec.num_layers, projections)
        if spec.moe is None:
            projections |= {f"mlp.{name}": spec.modules[name] for name in _DENSE if name in spec.modules}
            return cls(spec.num_layers, projections)
        if spec.moe.fused or len(spec.moe.layers) < spec.num_layers:
            raise BenchError(f"{model}: adapters are not made for all of its layers; use --attention-only")
        parent, leaves = _EXPERTS.get(spec.architecture, ("mlp", _MLP))
        sizes = [spec.modules[place] for place in ("experts.w1", "experts.w3", "experts.w2")]
        for number in range(spec.moe.num_experts):
            expert = f"{parent}.experts.{number}"
            projections |= {f"{expert}.{leaf}": size for leaf, size in zip(leaves, sizes, strict=True)}
        return cls(spec.num_layers, projections)


def _spec_of(model: Path) -> "ModelSpec":
    try:
        from adapter_store import InvalidModel, ModelSpec
    except ModuleNotFoundError as error:
        raise BenchError(f"--model needs the package {error.name}: pip install 'lorafleet[store]'") from error
    try:
        return ModelSpec.from_config_alone(model)
    except (InvalidModel, OSError) as error:
        raise BenchError(str(error)) from error


@dataclass(frozen=True, slots=True)
class AdapterMaker:
    """bfloat16 values between 2^-8 and 2^-5 of either sign, in A and B: small, and every product counts.

    All adapters of a maker share one block of random bytes, each turned by another number of tensor values.
    """

    header: bytes
    block: bytes
    config: bytes

    @classmethod
    def make(cls, shapes: Shapes, rank: int, seed: int = 0) -> "AdapterMaker":
        """All these projections of every layer, at one rank. The block is as big as one adapter."""
        entries: dict[str, object] = {}
        end = 0
        for layer in range(shapes.num_layers):
            for place, (inputs, outputs) in shapes.projections.items():
                path = f"base_model.model.model.layers.{layer}.{place}"
                for half, shape in (("A", [rank, inputs]), ("B", [outputs, rank])):
                    start, end = end, end + 2 * shape[0] * shape[1]
                    entries[f"{path}.lora_{half}.weight"] = {
                        "dtype": "BF16",
                        "shape": shape,
                        "data_offsets": [start, end],
                    }
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        return cls(
            struct.pack("<Q", len(text)) + text, _random_bfloat16(end // 2, seed), _config(rank, shapes)
        )

    @property
    def num_bytes(self) -> int:
        return len(self.header) + len(self.block)

    def write(self, folder: Path, number: int) -> None:
        """The PEFT folder of adapter `number`; another number is another content."""
        folder.mkdir(parents=True, exist_ok=True)
        turn = 2 * ((number * 7919 + 1) % (len(self.block) // 2))
        with (folder / "adapter_model.safetensors").open("wb") as file:
            file.write(self.header)
            view = memoryview(self.block)
            file.write(view[turn:])
            file.write(view[:turn])
        (folder / "adapter_config.json").write_bytes(self.config)


def _random_bfloat16(count: int, seed: int) -> bytes:
    """Random bits are made into sign, 3 of the exponent's values, and the mantissa: two bytes a value."""
    lows, highs = Random(seed), Random(seed + 1)
    values = bytearray(2 * count)
    for start in range(0, count, _RANDOM_BYTES):
        end = min(count, start + _RANDOM_BYTES)
        values[2 * start : 2 * end : 2] = lows.randbytes(end - start)
        values[2 * start + 1 : 2 * end : 2] = highs.randbytes(end - start).translate(_HIGH_BYTE)
    return bytes(values)


# A bfloat16's high byte: the sign and seven bits of the exponent; its low byte: the last bit, the mantissa.
# 0x3b and 0x3c: exponents 118 to 121, so magnitudes from 2^-9 up to 2^-5.
_HIGH_BYTE = bytes((bits & 0x80) | (0x3B + (bits & 1)) for bits in range(256))


def _config(rank: int, shapes: Shapes) -> bytes:
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_dora": False,
        "use_rslora": False,
        "target_modules": sorted({place.rpartition(".")[2] for place in shapes.projections}),
    }
    return json.dumps(config, indent=1).encode()


def make_folders(
    maker: AdapterMaker, folder: Path, names: Mapping[int, str], told: Callable[[str], None]
) -> None:
    """folder/<name> for each, by number; `told` each name that is done."""
    for number, name in names.items():
        maker.write(folder / name, number)
        told(name)


def push(
    maker: AdapterMaker, adapters: Adapters, names: Mapping[int, str], told: Callable[[str], None]
) -> None:
    """To a running scheduler. Raises LoraFleetError."""
    for number, name in names.items():
        with TemporaryDirectory(prefix="lorafleet-bench-") as folder:
            maker.write(Path(folder), number)
            adapters.push(folder, name)
        told(name)


def put_into_store(
    maker: AdapterMaker,
    store_url: str,
    model: Path,
    names: Mapping[int, str],
    told: Callable[[str], None],
    threads: int = 1,
) -> None:
    """Checked as any push is, straight into the store, without a scheduler. Raises BenchError."""
    try:
        from adapter_store import AdapterStoreError, ModelSpec, open_store
    except ModuleNotFoundError as error:
        raise BenchError(f"--store needs the package {error.name}: pip install 'lorafleet[store]'") from error

    def put(number: int) -> str:
        with TemporaryDirectory(prefix="lorafleet-bench-") as folder:
            maker.write(Path(folder), number)
            store.put(Path(folder), "default", names[number], spec)
        return names[number]

    try:
        store, spec = open_store(store_url), ModelSpec.from_folder(model)
        with ThreadPoolExecutor(threads) as pool:
            for name in pool.map(put, names):
                told(name)
    except AdapterStoreError as error:
        raise BenchError(str(error)) from error
