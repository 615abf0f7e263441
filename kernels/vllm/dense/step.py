"""What the reference API tells a dense operation about a step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.errors import KernelArgumentError


@dataclass(frozen=True, slots=True)
class Step:
    """The seven tensors, in the reference's order of arguments: `LoRAKernelMeta.meta_args` makes them.

    token_lora_mapping                int32 [rows]: each row's slot, -1: none
    token_indices_sorted_by_lora_ids  int32 [rows]: row numbers, slot by slot
    num_tokens_per_lora               int32 [max_loras + 1]: rows of each group of that order
    lora_token_start_loc              int32 [max_loras + 2]: where the groups start
    lora_ids                          int32 [max_loras + 1]: their slots, -1 for rows without an adapter
    no_lora_flag_cpu, num_active_loras  one element each, on the CPU
    """

    token_lora_mapping: Tensor
    token_indices_sorted_by_lora_ids: Tensor
    num_tokens_per_lora: Tensor
    lora_token_start_loc: Tensor
    lora_ids: Tensor
    no_lora_flag_cpu: Tensor
    num_active_loras: Tensor

    @property
    def idle(self) -> bool:
        """Whether no row has an adapter: then operations change nothing."""
        return bool(self.no_lora_flag_cpu.item())

    @property
    def num_ids(self) -> int:
        return self.lora_ids.shape[0]

    @property
    def groups(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the kernels read, in the order of their arguments. The mapping says nothing more."""
        return (
            self.token_indices_sorted_by_lora_ids, self.num_tokens_per_lora, self.lora_token_start_loc,
            self.lora_ids,
        )  # fmt: skip

    def check(self, rows: int, device: torch.device) -> None:
        """Whether it describes so many rows there. Raises KernelArgumentError."""
        groups = self.num_ids
        _check_list("token_lora_mapping", self.token_lora_mapping, rows, device)
        _check_list("token_indices_sorted_by_lora_ids", self.token_indices_sorted_by_lora_ids, rows, device)
        _check_list("num_tokens_per_lora", self.num_tokens_per_lora, groups, device)
        _check_list("lora_token_start_loc", self.lora_token_start_loc, groups + 1, device)
        _check_list("lora_ids", self.lora_ids, groups, device)
        _check_flag("no_lora_flag_cpu", self.no_lora_flag_cpu)
        _check_flag("num_active_loras", self.num_active_loras)


def _check_list(name: str, tensor: Tensor, size: int, device: torch.device) -> None:
    if tensor.shape != (size,) or tensor.dtype != torch.int32 or not tensor.is_contiguous():
        found = f"{tensor.dtype} {list(tensor.shape)}"
        raise KernelArgumentError(name, f"must be contiguous int32 [{size}], is {found}")
    if tensor.device != device:
        raise KernelArgumentError(name, f"is on {tensor.device}, the other arguments are on {device}")


def _check_flag(name: str, flag: Tensor) -> None:
    if flag.numel() != 1 or not flag.is_cpu:
        raise KernelArgumentError(name, "must be one element on the CPU")
