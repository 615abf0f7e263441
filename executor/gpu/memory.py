"""How many KV blocks a GPU has room for, beside everything else that the executor keeps there."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from executor.errors import StartError

logger = logging.getLogger(__name__)

# For captured graphs, the sampler and the allocator's gaps.
_RESERVE = 2 << 30


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of one GPU: `total`; `others`, in use before and beside this process's tensors; `resident`, the
    tensors that stay (weights, slots, workspaces); `peak`, with the largest step on top; `page_in`, the
    largest adapter, which comes to the device as a whole before it is in its slot: it comes later."""

    total: int
    others: int
    resident: int
    peak: int
    page_in: int

    def kv_bytes(self, utilization: float) -> int:
        """What is left of the share that this executor may use; negative when that is too small."""
        return int(self.total * utilization) - self.others - self.peak - self.page_in - _RESERVE


def usable_bytes(name: str, utilization: float) -> int:
    """The bytes of the device that this executor may take beside what is in use before. Raises StartError
    when it is not there."""
    device = torch.device(name)
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise StartError(f"--device {name}: there are {torch.cuda.device_count()} GPUs")
    free, total = torch.cuda.mem_get_info(device.index or 0)
    return int(total * utilization) - (total - free)


def measure(device: torch.device, largest_steps: Callable[[], None], page_in: int) -> MemoryUse:
    """Runs `largest_steps`; nothing else may allocate on the device meanwhile."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    resident = torch.cuda.memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    largest_steps()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    return MemoryUse(total, others, resident, peak, page_in)


def blocks_that_fit(use: MemoryUse, utilization: float, block_bytes: int, least: int) -> int:
    """Raises StartError, with what takes the memory, when fewer than `least` blocks fit."""
    blocks = use.kv_bytes(utilization) // block_bytes
    if blocks < least:
        raise StartError(
            f"--gpu-memory-utilization {utilization} of {_gib(use.total)} GiB leaves {max(blocks, 0)} KV "
            f"blocks of {block_bytes >> 10} KiB, and {least} are needed: weights, slots and workspaces take "
            f"{_gib(use.resident)} GiB, the largest step {_gib(use.peak - use.resident)}, an adapter on its "
            f"way into a slot {_gib(use.page_in)}, other programs and CUDA itself {_gib(use.others)}, and "
            f"{_gib(_RESERVE)} are kept free. Fewer or smaller slots "
            "(--max-loras, --max-lora-rank, --lora-modules) or smaller steps (--max-batched-tokens) make room"
        )
    logger.info(
        "memory: weights, slots and workspaces %s GiB, the largest step %s, KV blocks %s of %s in all",
        _gib(use.resident),
        _gib(use.peak - use.resident),
        _gib(blocks * block_bytes),
        _gib(use.total),
    )
    return blocks


def log_captured(device: torch.device, capture: Callable[[], None]) -> None:
    """Runs `capture`, and says what its graphs took of the memory that is kept free for them."""
    free = torch.cuda.mem_get_info(device)[0]
    capture()
    torch.cuda.synchronize(device)
    taken = free - torch.cuda.mem_get_info(device)[0]
    level = logging.WARNING if taken > _RESERVE else logging.INFO
    logger.log(level, "captured steps take %s GiB of the %s that are kept free", _gib(taken), _gib(_RESERVE))


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f}"
