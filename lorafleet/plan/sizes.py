"""What a model, its adapters and its KV cache take, in bytes, from config.json alone."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from lorafleet.bench.errors import BenchError
from lorafleet.bench.shapes import SHAPES

if TYPE_CHECKING:
    from adapter_store import ModelSpec
    from adapter_store.base.config import BaseConfig

ITEM_BYTES = 2  # bfloat16, for weights, slots and the KV cache
# As the executor lays adapters out (executor/lora/layout.py) and keeps memory free (executor/slot_count.py).
_PIECE_ELEMENTS = 128
_TABLE_BYTES = 36  # of each module
_DORA_BYTES = 4  # of each output
_LOGIT_BYTES = 6
_SCORED_ROWS = 512
_RESERVE_BYTES = 4 << 30
_TOKENS_A_SEAT = 1024

_ATTENTION = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
_EXPERT = ("experts.w1", "experts.w3", "experts.w2")


@dataclass(frozen=True, slots=True)
class Module:
    """Linear layers of one shape: `count` in the whole model, each with so many `experts` side by side, or 1
    where it has none."""

    inputs: int
    outputs: int
    count: int
    experts: int = 1


@dataclass(frozen=True, slots=True)
class Settings:
    """What an executor's memory is shared out by, as its flags say."""

    seats: int = 64
    step_tokens: int = 8192
    utilization: float = 0.9


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """`adapted`: the modules that adapters are on. `kv_token_bytes`: of one token in all layers."""

    name: str
    num_layers: int
    hidden_size: int
    step_width: int  # of the widest intermediate row of a step
    vocab_size: int
    max_model_len: int
    weight_bytes: int
    kv_token_bytes: int
    adapted: tuple[Module, ...]

    @classmethod
    def of(cls, model: str, *, attention_only: bool = False) -> "ModelSizes":
        """A name of `lorafleet bench shapes`, or a folder with config.json. Raises BenchError."""
        if model not in SHAPES:
            return cls._of(model, Path(model), attention_only)
        with TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES[model]))
            return cls._of(model, Path(folder), attention_only)

    @classmethod
    def _of(cls, name: str, folder: Path, attention_only: bool) -> "ModelSizes":
        base, spec = _read(name, folder)
        modules = list(_modules(spec, base))
        moe = spec.moe
        if moe and moe.fused and not attention_only:
            raise BenchError(f"{name}: adapters on its experts are not planned; use --attention-only")
        adapted = [module for kind, module in modules if kind in _ATTENTION or not attention_only]
        heads = 1 if spec.tied_head else 2
        parameters = spec.vocab_size * spec.hidden_size * heads + sum(
            module.inputs * module.outputs * module.count * module.experts for _, module in modules
        )
        norms = (2 * spec.num_layers + 1) * spec.hidden_size
        routers = len(moe.layers) * moe.num_experts * spec.hidden_size if moe else 0
        width = base.intermediate_size
        if base.experts:
            width = base.experts.inner * base.fields.integer("num_experts_per_tok")
        return cls(
            name,
            spec.num_layers,
            spec.hidden_size,
            width,
            spec.vocab_size,
            spec.max_model_len,
            (parameters + norms + routers) * ITEM_BYTES,
            2 * spec.num_layers * base.num_kv_heads * base.head_dim * ITEM_BYTES,
            tuple(adapted),
        )

    def is_alike(self, other: "ModelSizes") -> bool:
        """Whether both have the same shapes, so that steps of one take the time of the other's, however long
        the requests are that each takes."""
        return self == replace(other, name=self.name, adapted=self.adapted, max_model_len=self.max_model_len)

    def adapter_bytes(self, rank: int) -> int:
        """The bytes of an adapter in host memory; as many are copied into a slot."""
        halves = sum(
            module.count * _aligned(rank * module.experts * width)
            for module in self.adapted
            for width in (module.inputs, module.outputs)
        )
        return halves * ITEM_BYTES + _TABLE_BYTES * sum(module.count for module in self.adapted)

    def slot_bytes(self, max_rank: int) -> int:
        """The bytes of a slot for adapters up to that rank, DoRA's factors among it."""
        outputs = sum(module.outputs * module.count for module in self.adapted if module.experts == 1)
        return self.adapter_bytes(max_rank) + _DORA_BYTES * outputs

    def fixed_bytes(self, settings: Settings) -> int:
        """What an executor takes beside slots and KV blocks."""
        rows = settings.step_tokens * (8 * self.hidden_size + 4 * self.step_width) * ITEM_BYTES
        logits = (_SCORED_ROWS + settings.seats) * self.vocab_size * _LOGIT_BYTES
        return self.weight_bytes + rows + logits + _RESERVE_BYTES

    def kv_tokens(self, memory: int, slots: int, max_rank: int, settings: Settings) -> int:
        """Tokens that the KV cache of a card with so much memory holds beside the slots; below 0: they do not
        fit at all."""
        left = int(memory * settings.utilization) - self.fixed_bytes(settings)
        return (left - slots * self.slot_bytes(max_rank)) // self.kv_token_bytes

    def kv_floor(self, settings: Settings) -> int:
        """Tokens that slots must leave room for, as `--max-loras auto` has it."""
        return settings.seats * _TOKENS_A_SEAT


def _aligned(elements: int) -> int:
    return -(-elements // _PIECE_ELEMENTS) * _PIECE_ELEMENTS


def _read(name: str, folder: Path) -> "tuple[BaseConfig, ModelSpec]":
    try:
        from adapter_store import InvalidModel, ModelSpec
        from adapter_store.base.config import BaseConfig
    except ModuleNotFoundError as error:
        raise BenchError(f"a plan needs the package {error.name}: pip install 'lorafleet[store]'") from error
    try:
        return BaseConfig.from_folder(folder), ModelSpec.from_config_alone(folder)
    except (InvalidModel, OSError) as error:
        known = ", ".join(SHAPES)
        raise BenchError(f"--model {name}: {error}; name a folder with config.json, or {known}") from error


def _modules(spec: "ModelSpec", base: "BaseConfig") -> Iterator[tuple[str, Module]]:
    """The modules by kind: every projection of the layers."""
    shapes: Mapping[str, tuple[int, int]] = spec.modules
    for kind in filter(shapes.__contains__, _ATTENTION):
        yield kind, Module(*shapes[kind], spec.num_layers)
    moe = spec.moe
    dense = spec.num_layers - (len(moe.layers) if moe else 0)
    for kind in filter(shapes.__contains__, _MLP if dense else ()):
        yield kind, Module(*shapes[kind], dense)
    if moe:
        for kind in _EXPERT if not moe.fused else ("experts.w13", "experts.w2"):
            yield kind, Module(*moe.places[kind], len(moe.layers), moe.num_experts)
        for kind in sorted(moe.places):
            if kind.startswith("shared_expert"):
                yield kind, Module(*moe.places[kind], len(moe.layers))
