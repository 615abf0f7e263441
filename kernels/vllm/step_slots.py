"""What a step's mapping says, as slots: vLLM names adapters by id, kernels by the slot of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kernels.errors import KernelArgumentError
from kernels.vllm.kernel_meta import Ints
from kernels.vllm.step_buffers import Field, Host

Ids = npt.NDArray[np.int64]


class LoRAMapping(Protocol):
    """What is read of vLLM's class of that name: adapter ids by row, and by row that reaches the head."""

    index_mapping: tuple[int, ...]
    prompt_mapping: tuple[int, ...]
    is_prefill: bool


@dataclass(frozen=True, slots=True, eq=False)
class StepSlots:
    """The slots of a step's rows, and of those that reach the head; -1 for rows without an adapter."""

    rows: Ints
    prompts: Ints

    @classmethod
    def of(cls, mapping: LoRAMapping, lora_index_to_id: Sequence[int | None], most_rows: int) -> "StepSlots":
        """Raises KernelArgumentError for more rows than `most_rows`, or an adapter that is in no slot."""
        slots = {adapter: slot for slot, adapter in enumerate(lora_index_to_id) if adapter is not None}
        known = np.array(sorted(slots), dtype=np.int64)
        places = np.array([slots[adapter] for adapter in known.tolist()], dtype=np.int32)
        parts = []
        for name in ("index_mapping", "prompt_mapping"):
            adapters = np.array(getattr(mapping, name), dtype=np.int64).reshape(-1)
            if len(adapters) > most_rows:
                raise KernelArgumentError(name, f"has {len(adapters)} rows, but the buffers hold {most_rows}")
            parts.append(_slots_of(adapters, known, places, name))
        return cls(*parts)


def _slots_of(adapters: Ids, known: Ids, places: Ints, name: str) -> Ints:
    slots = np.full(len(adapters), -1, dtype=np.int32)
    asked = adapters > 0
    wanted = adapters[asked]
    found = np.searchsorted(known, wanted)
    missing = wanted if len(known) == 0 else wanted[known[found.clip(max=len(known) - 1)] != wanted]
    if len(missing):
        raise KernelArgumentError(name, f"names adapter {missing[0]}, which is in no slot")
    slots[asked] = places[found]
    return slots


def index_fields(max_num_batched_tokens: int) -> dict[str, Field]:
    """The tensors of `PunicaWrapperBase` that are refilled each step, int64."""
    rows = Field((max_num_batched_tokens,), wide=True)
    return {
        "token_lora_indices": rows,
        "sampler_indices": rows,
        "sampler_indices_padded": rows,
        "embeddings_indices": Field((2, max_num_batched_tokens), wide=True),
    }


def write_indices(host: Host, step: StepSlots, max_loras: int, vocab_size: int) -> None:
    """Fill the arrays of `index_fields`. `max_loras` counts the place of rows without an adapter, too.

    A padded sampler index is `row + slot * rows`, where rows without an adapter use the last place. The
    second row of the embedding's indices is where a slot's tokens begin in A's stack of vocabularies; the
    first is 0, since adapters add no tokens of their own.
    """
    rows, prompts = len(step.rows), len(step.prompts)
    host["token_lora_indices"][:rows] = step.rows
    host["sampler_indices"][:prompts] = step.prompts
    padded = np.where(step.prompts < 0, max_loras - 1, step.prompts).astype(np.int64)
    host["sampler_indices_padded"][:prompts] = np.arange(prompts) + padded * prompts
    host["embeddings_indices"][1, :rows] = step.rows.clip(min=0).astype(np.int64) * vocab_size
