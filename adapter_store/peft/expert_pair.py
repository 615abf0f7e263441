"""The lora_A and lora_B of one expert, or over a parameter of all experts, as a file has them."""

from dataclasses import dataclass, field
from typing import Literal

from adapter_store.errors import InvalidAdapter
from adapter_store.files.safetensors_file import TensorInfo
from adapter_store.peft.config import CONFIG_FILE, LoraSettings
from adapter_store.peft.shapes import check_matrix

Half = Literal["a", "b"]


@dataclass
class ExpertPair:
    """`path`: what PEFT's patterns match; of a pair over a parameter, up to "experts"."""

    layer: int
    path: str
    halves: dict[Half, TensorInfo] = field(default_factory=dict)

    @property
    def a(self) -> TensorInfo:
        return self.halves["a"]

    @property
    def b(self) -> TensorInfo:
        return self.halves["b"]

    def put(self, half: Half, tensor: TensorInfo) -> None:
        """Raises InvalidAdapter when it has this half already."""
        if half in self.halves:
            raise InvalidAdapter(
                f"tensors {self.halves[half].name!r} and {tensor.name!r} mean the same thing"
            )
        self.halves[half] = tensor

    def check(self) -> None:
        """Raises InvalidAdapter unless both halves are there, and matrices."""
        for tensor in self.halves.values():
            if len(self.halves) == 1:
                missing = "lora_B" if "a" in self.halves else "lora_A"
                raise InvalidAdapter(f"tensor {tensor.name!r} has no matching {missing}")
            check_matrix(tensor)

    def check_ranks(self) -> None:
        """Once the widths are known to be right. Raises InvalidAdapter unless the halves have one rank."""
        if self.a.shape[0] != self.b.shape[1]:
            raise InvalidAdapter(
                f"tensor {self.b.name!r} has rank {self.b.shape[1]}, its lora_A has {self.a.shape[0]}"
            )


def check_rank(tensor: TensorInfo, rank: int, path: str, settings: LoraSettings) -> None:
    """Raises InvalidAdapter when the config says another rank for this path."""
    wanted = settings.rank_at(path)
    if rank != wanted:
        raise InvalidAdapter(f"tensor {tensor.name!r} has rank {rank}, {CONFIG_FILE} says {wanted}")
