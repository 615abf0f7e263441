"""What can be set of a simulated executor."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExecutorSettings:
    """The flags of an executor that a simulation needs; bytes are of one executor."""

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
