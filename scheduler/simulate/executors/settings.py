"""What can be set of a simulated executor."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class ExecutorSettings:
    """The flags of an executor that a simulation needs; bytes are of one executor. Raises ValueError."""

    seats: int = 256
    slots: int = 16
    max_batched_tokens: int = 8192
    max_model_len: int = 8192
    max_rank: int = 16
    kv_blocks: int = 28_000
    block_size: int = 16
    page_ins_per_step: int = 4
    loader_threads: int = 4
    host_bytes: int = 14_000_000_000
    disk_bytes: int = 0
    aging_s: float = 2.0

    def __post_init__(self) -> None:
        may_be_none = ("disk_bytes", "aging_s")
        for field in fields(self):
            least, value = 0 if field.name in may_be_none else 1, getattr(self, field.name)
            if value < least:
                raise ValueError(f"{field.name} of an executor is {value}, and must be at least {least}")
        if self.max_batched_tokens < self.seats:
            raise ValueError(
                f"max_batched_tokens is {self.max_batched_tokens}, and must be at least seats ({self.seats})"
            )
