"""A recipe that makes the pushed weights file again from the packed one: it holds what that lacks.

Packed file and recipe are half the bytes of keeping both files, and all of the pushed one.

A PEFT file is a header, then tensors; each is one of the packed tensors as it is (an A, a full head), or
transposed (a B), or something that was checked and left out (a copy of the base's own weight), which the
recipe holds itself:

    hash of the rest | length of the head (8 bytes, little) | head (JSON) | header of the file | left out

The packed tensors have their own hashes, in the version's digest.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from adapter_store.errors import DataLoss
from adapter_store.files.hashing import bulk_hash
from adapter_store.packed.form import LoRAModule, Weights
from adapter_store.peft.folder import WEIGHTS_FILE, PeftAdapter

HASH_BYTES = 32


@dataclass(frozen=True, slots=True)
class _Head:
    header_bytes: int
    parts: tuple[
        tuple[str, int], ...
    ]  # in file order: (packed tensor, -1), or ("", bytes held by the recipe)


def recipe_pieces(adapter: PeftAdapter) -> list[memoryview]:
    """The recipe, as views where it is large."""
    packed = {halves.a.name: f"{module}.lora_a" for module, halves in adapter.halves.items()}
    packed |= {halves.b.name: f"{module}.lora_b" for module, halves in adapter.halves.items()}
    packed |= {
        halves.magnitude.name: f"{module}.magnitude"
        for module, halves in adapter.halves.items()
        if halves.magnitude is not None
    }
    packed |= {tensor.name: f"{head}.weight" for head, tensor in adapter.head_tensors.items()}
    # Experts in a layout that the packed form does not follow are held whole.
    following = {module: pair for module, pair in adapter.experts.items() if pair.follows_packed}
    packed |= {pair.a.tensors[0].name: f"{module}.lora_a" for module, pair in following.items()}
    packed |= {pair.b.tensors[0].name: f"{module}.lora_b" for module, pair in following.items()}
    file = adapter.file
    tensors = sorted(file, key=lambda tensor: (tensor.begin, tensor.end))
    parts = [
        (packed[each.name], -1) if each.name in packed else ("", each.end - each.begin) for each in tensors
    ]
    header = file.content[: tensors[0].begin]
    head = json.dumps({"header_bytes": len(header), "parts": parts}).encode()
    left_out = [file.raw(each.name) for each in tensors if each.name not in packed]
    pieces = [memoryview(len(head).to_bytes(8, "little") + head), header, *left_out]
    return [memoryview(bytes.fromhex(bulk_hash(*pieces))), *pieces]


def rebuild(recipe: memoryview, weights: Weights, target: BinaryIO | None = None) -> None:
    """Writes the pushed file; None: only checks that it can be written. Raises DataLoss before it writes.

    `weights` are verified.
    """
    body = recipe[HASH_BYTES:]
    try:
        if bulk_hash(body) != recipe[:HASH_BYTES].hex():
            raise ValueError("it does not match its hash")
        start = 8 + int.from_bytes(body[:8], "little")
        head = _Head(**json.loads(bytes(body[8:start])))
    except (ValueError, TypeError) as error:
        raise DataLoss(
            f"{WEIGHTS_FILE} of {weights.manifest.digest} cannot be rebuilt: {error}: push the adapter again"
        ) from error
    if target is not None:
        for data in _pieces(head, body[start:], weights):
            target.write(data)


def _pieces(head: _Head, rest: memoryview, weights: Weights) -> Iterator[Any]:
    yield rest[: head.header_bytes]
    position = head.header_bytes
    for name, num_bytes in head.parts:
        if not name:
            yield rest[position : position + num_bytes]
            position += num_bytes
            continue
        yield np.ascontiguousarray(_as_pushed(weights, name)).reshape(-1).view(np.uint8).data


def _as_pushed(weights: Weights, name: str) -> NDArray[Any]:
    module, _, part = name.rpartition(".")
    if part == "weight" and module in weights.full_heads:
        return weights.full_heads[module]
    match part, weights.get(module):
        case "lora_a", LoRAModule(lora_a=a):
            return a
        case "lora_b", LoRAModule(lora_b=b):
            return b.T
        case "magnitude", LoRAModule(magnitude=magnitude) if magnitude is not None:
            return magnitude
    raise DataLoss(f"{WEIGHTS_FILE} of {weights.manifest.digest} had no {name}: push the adapter again")
