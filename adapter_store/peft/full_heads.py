"""Fully trained lm_head and embed_tokens in an adapter (PEFT's modules_to_save): matrices of its own.

PEFT gives a tied base's head and embedding a matrix each, unless ensure_weight_tying asks for one: then it
writes that one under both names.
"""

from collections.abc import Collection, Mapping

import numpy as np

from adapter_store.errors import IncompatibleAdapter, InvalidAdapter
from adapter_store.files.safetensors_file import NUMPY_DTYPES, TensorFile, TensorInfo
from adapter_store.manifest import FullHead
from adapter_store.model_spec import ModelSpec
from adapter_store.peft.config import CONFIG_FILE, LoraSettings

HEADS = ("embed_tokens", "lm_head")


def named_heads(settings: LoraSettings, spec: ModelSpec) -> frozenset[str]:
    """Whose matrices an adapter must bring."""
    tied = settings.full_heads and settings.ensure_weight_tying and spec.tied_head
    return frozenset(HEADS) if tied else settings.full_heads


def check_full_heads(
    file: TensorFile,
    found: Mapping[str, TensorInfo],
    paired: Collection[str],
    settings: LoraSettings,
    spec: ModelSpec,
) -> tuple[FullHead, ...]:
    """`found`: the tensor of each named head; `paired`: modules with LoRA. Raises InvalidAdapter (what is
    missing, or is there twice) and IncompatibleAdapter (another base)."""
    for name in sorted(named_heads(settings, spec)):
        if name not in found:
            raise InvalidAdapter(f"{CONFIG_FILE}: modules_to_save needs a trained {name}, the file has none")
        if name in paired:
            raise InvalidAdapter(f"tensor {found[name].name!r}: {name} has LoRA, too; only one can be served")
        _check_matrix(found[name], spec)
    if len(found) == 2 and settings.ensure_weight_tying and spec.tied_head:
        first, second = (found[name] for name in HEADS)
        if first.dtype != second.dtype or not np.array_equal(file.raw(first.name), file.raw(second.name)):
            raise InvalidAdapter(
                f"{CONFIG_FILE}: ensure_weight_tying is true, but {first.name!r} and {second.name!r} differ"
            )
    return tuple(FullHead(name, *found[name].shape) for name in HEADS if name in found)


def _check_matrix(tensor: TensorInfo, spec: ModelSpec) -> None:
    wanted = [spec.vocab_size, spec.hidden_size]
    if list(tensor.shape) != wanted:
        raise IncompatibleAdapter(
            f"tensor {tensor.name!r} has shape {list(tensor.shape)}, the base {spec.name} needs {wanted}"
        )
    if tensor.dtype not in NUMPY_DTYPES:
        raise InvalidAdapter(f"tensor {tensor.name!r} has dtype {tensor.dtype}, not F32, F16 or BF16")
