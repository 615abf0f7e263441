"""LoRAKernelMeta as vLLM has it: a step's rows grouped by slot, in tensors that keep their addresses."""

import bisect
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.vllm.step_buffers import Field, Host

Ints = npt.NDArray[np.int32]
MetaArguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class TokenGroups:
    """Rows grouped by slot on the host. No group is named when no row has an adapter, as in the reference."""

    slots: Ints  # [rows]: each row's slot, -1 for none
    order: Ints  # [rows]: row numbers, group after group, ascending within one
    ids: Ints  # [groups]: their slots, ascending, so that -1 comes first
    counts: Ints  # [groups]: their rows

    @property
    def no_lora(self) -> bool:
        return len(self.ids) == 0

    def write(self, host: Host, prefix: str = "") -> None:
        """Fill the five arrays of `meta_fields(..., prefix)`; nothing of an earlier step stays in them.

        Where the reference leaves an earlier step's rows in the mapping (behind the step's, or in a step
        without adapters), -1 is written: no kernel then takes a padding row for an adapter's.
        """
        rows, groups = len(self.slots), len(self.ids)
        _fill(host[prefix + "token_lora_mapping"], self.slots, -1)
        host[prefix + "token_indices_sorted_by_lora_ids"][:rows] = self.order
        _fill(host[prefix + "active_lora_ids"], self.ids, -1)
        _fill(host[prefix + "num_tokens_per_lora"], self.counts, 0)
        starts = host[prefix + "lora_token_start_loc"]
        starts[0] = 0
        starts[1 : groups + 1] = np.cumsum(self.counts)
        starts[groups + 1 :] = 0


def _fill(array: npt.NDArray[np.signedinteger], values: Ints, rest: int) -> None:
    array[: len(values)] = values
    array[len(values) :] = rest


def group_tokens(slots: Ints, max_loras: int, max_num_tokens: int) -> TokenGroups:
    """Group a step's rows. Raises KernelArgumentError for too many rows or a slot outside [-1, max_loras)."""
    if len(slots) > max_num_tokens:
        raise KernelArgumentError(
            "token_lora_mapping", f"has {len(slots)} rows, but the buffers hold {max_num_tokens}"
        )
    outside = slots[(slots < -1) | (slots >= max_loras)]
    if len(outside):
        raise KernelArgumentError(
            "token_lora_mapping", f"names slot {outside[0]}, which is outside [-1, {max_loras})"
        )
    counts = np.bincount(slots + 1, minlength=max_loras + 1).astype(np.int32)
    order = np.argsort(slots, kind="stable").astype(np.int32)
    groups = np.flatnonzero(counts) if counts[1:].any() else np.empty(0, dtype=np.int64)
    return TokenGroups(slots, order, (groups - 1).astype(np.int32), counts[groups])


def meta_fields(max_loras: int, max_num_tokens: int, prefix: str = "") -> dict[str, Field]:
    """The tensors that a meta refills each step, int32. Rows without a slot are one group more."""
    return {
        prefix + "token_lora_mapping": Field((max_num_tokens,)),
        prefix + "token_indices_sorted_by_lora_ids": Field((max_num_tokens,)),
        prefix + "active_lora_ids": Field((max_loras + 1,)),
        prefix + "num_tokens_per_lora": Field((max_loras + 1,)),
        prefix + "lora_token_start_loc": Field((max_loras + 2,)),
    }


@dataclass(eq=False)
class LoRAKernelMeta:
    """The reference's fields. A running example: 3 slots, mapping [1, 1, -1, 0, 1], 5 rows of at most 6.

        token_lora_mapping                [1, 1, -1, 0, 1, -1]  int32 [max_num_tokens]
        token_indices_sorted_by_lora_ids  [2, 3, 0, 1, 4, ..]   int32 [max_num_tokens]
        active_lora_ids                   [-1, 0, 1, -1]        int32 [max_loras + 1], then -1
        num_tokens_per_lora               [1, 1, 3, 0]          int32 [max_loras + 1], beside the ids, then 0
        lora_token_start_loc              [0, 1, 2, 5, 0]       int32 [max_loras + 2], then 0

    On the CPU, as tensors of one element so that a traced graph reads them anew each step: whether no row has
    an adapter (bool), the number of groups (int32, rounded up to the next of `captured_lora_counts`), and the
    most groups that there can be (int32).
    """

    token_lora_mapping: Tensor
    token_indices_sorted_by_lora_ids: Tensor
    active_lora_ids: Tensor
    num_tokens_per_lora: Tensor
    lora_token_start_loc: Tensor
    no_lora_flag_cpu: Tensor
    num_active_loras_cpu: Tensor
    default_num_active_loras_cpu: Tensor
    captured_lora_counts: list[int] = field(default_factory=list)

    @staticmethod
    def make(
        max_loras: int,
        max_num_tokens: int,
        device: torch.device | str,
        captured_lora_counts: list[int] | None = None,
    ) -> "LoRAKernelMeta":
        """A meta over buffers of its own, which describe no row."""
        tensors = {
            name: torch.zeros(each.shape, dtype=torch.int32, device=device)
            for name, each in meta_fields(max_loras, max_num_tokens).items()
        }
        return LoRAKernelMeta.over(tensors, captured_lora_counts)

    @staticmethod
    def over(
        tensors: dict[str, Tensor], captured_lora_counts: list[int] | None = None, prefix: str = ""
    ) -> "LoRAKernelMeta":
        """A meta over the buffers that `meta_fields(..., prefix)` names. It sets them to describe no row."""
        fields = {name: tensors[prefix + name] for name in meta_fields(1, 1)}
        for name, tensor in fields.items():
            tensor.fill_(-1 if name in ("token_lora_mapping", "active_lora_ids") else 0)
        most_groups = len(fields["active_lora_ids"])
        return LoRAKernelMeta(
            **fields,
            no_lora_flag_cpu=torch.tensor([False], dtype=torch.bool, device="cpu"),
            num_active_loras_cpu=torch.tensor([0], dtype=torch.int32, device="cpu"),
            default_num_active_loras_cpu=torch.tensor([most_groups], dtype=torch.int32, device="cpu"),
            captured_lora_counts=sorted(captured_lora_counts or []),
        )

    def prepare_tensors(self, token_lora_mapping: Tensor) -> None:
        """Describe a step whose rows' slots are `token_lora_mapping`, integers [rows] on any device.

        Waits for the device where the mapping is on one: the wrapper's `update_metadata` does not, since it
        knows the step on the host. Raises KernelArgumentError, as `group_tokens` does, before it writes.
        """
        slots = token_lora_mapping.cpu().numpy().astype(np.int32)
        groups = group_tokens(slots, len(self.active_lora_ids) - 1, len(self.token_lora_mapping))
        host: Host = {name: getattr(self, name).cpu().numpy() for name in meta_fields(1, 1)}
        groups.write(host)
        for name, array in host.items():
            getattr(self, name).copy_(torch.from_numpy(array))
        self.set_counts(groups)

    def set_counts(self, groups: TokenGroups) -> None:
        """Set what the host reads of a step whose tensors are written elsewhere."""
        number = len(groups.ids)
        captured = self.captured_lora_counts
        place = bisect.bisect_left(captured, number)
        # A captured graph's grid has the number of groups that it was captured with.
        if number > 0 and place < len(captured):
            number = captured[place]
        self.no_lora_flag_cpu.fill_(groups.no_lora)
        self.num_active_loras_cpu.fill_(number)

    def meta_args(self, token_nums: int, specialize_active_lora: bool) -> MetaArguments:
        """The seven tensors that the operations take behind their own, in order, for `token_nums` rows."""
        counted = self.num_active_loras_cpu if specialize_active_lora else self.default_num_active_loras_cpu
        return (
            self.token_lora_mapping[:token_nums],
            self.token_indices_sorted_by_lora_ids[:token_nums],
            self.num_tokens_per_lora,
            self.lora_token_start_loc,
            self.active_lora_ids,
            self.no_lora_flag_cpu,
            counted,
        )
