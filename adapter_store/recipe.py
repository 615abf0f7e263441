"""A pushed weights file told as what the packed file does not have: half the bytes, and all of the file.

A PEFT file is a header, then tensors; each is one of the packed tensors as it is (an A), or transposed (a B),
or something that was checked and left out (a copy of the base's own weight), which the recipe holds itself:

    length of the head (8 bytes, little) | head (JSON) | header of the file | tensors that were left out
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

import numpy as np

from adapter_store.errors import DataLoss
from adapter_store.packed import Weights
from adapter_store.peft import WEIGHTS_FILE, PeftAdapter


@dataclass(frozen=True, slots=True)
class _Head:
    sha256: str  # of the whole file, hex
    header_bytes: int
    parts: tuple[
        tuple[str, int], ...
    ]  # in file order: (packed tensor, -1), or ("", bytes held by the recipe)


def write_recipe(adapter: PeftAdapter, target: BinaryIO) -> None:
    packed = {halves.a.name: f"{module}.lora_a" for module, halves in adapter.halves.items()}
    packed |= {halves.b.name: f"{module}.lora_b" for module, halves in adapter.halves.items()}
    file = adapter.file
    tensors = sorted(file, key=lambda tensor: (tensor.begin, tensor.end))
    parts = [
        (packed[each.name], -1) if each.name in packed else ("", each.end - each.begin) for each in tensors
    ]
    header = file.content[: tensors[0].begin]
    sha256 = hashlib.sha256(file.content).hexdigest()
    head = json.dumps(asdict(_Head(sha256, len(header), tuple(parts)))).encode()
    target.write(len(head).to_bytes(8, "little") + head + header)
    for each in tensors:
        if each.name not in packed:
            target.write(file.raw(each.name))


def rebuild(recipe: BinaryIO, weights: Weights, target: BinaryIO | None = None) -> None:
    """Writes the pushed file; None: only checks that it would be right. Raises DataLoss, even at the end."""
    length = int.from_bytes(recipe.read(8), "little")
    try:
        head = _Head(**json.loads(recipe.read(length)))
    except (ValueError, TypeError) as error:
        raise DataLoss(f"{WEIGHTS_FILE} of {weights.manifest.digest} cannot be rebuilt: {error!r}") from error
    found = hashlib.sha256()
    for data in _pieces(head, recipe, weights):
        found.update(data)
        if target is not None:
            target.write(data)
    if found.hexdigest() != head.sha256:
        raise DataLoss(
            f"{WEIGHTS_FILE} of {weights.manifest.digest} cannot be rebuilt: push the adapter again"
        )


def _pieces(head: _Head, recipe: BinaryIO, weights: Weights) -> Iterator[Any]:
    yield recipe.read(head.header_bytes)
    for name, num_bytes in head.parts:
        if not name:
            yield recipe.read(num_bytes)
            continue
        module, _, half = name.rpartition(".")
        array = weights[module].lora_a if half == "lora_a" else weights[module].lora_b.T
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
