"""The group of ranks that share one model: a value that is handed to whatever is cut over them."""

import os
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

# Torch 2.13 renamed it and warns about the old name, which is all that 2.11 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class ParallelGroup:
    """`size` ranks, of which this process is number `rank`.

    Every method is a collective: all ranks make the same calls in the same order, with equal shapes and
    dtypes. With one rank none of them calls anything.
    """

    rank: int = 0
    size: int = 1
    handle: dist.ProcessGroup | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place; returns x."""
        if self.size > 1:
            dist.all_reduce(x, group=self.handle)
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x, in place; returns x."""
        if self.size > 1:
            dist.broadcast(x, src=0, group=self.handle)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x, as [size, *x.shape]."""
        if self.size == 1:
            return x[None]
        # Flat: gloo wants what it stacks along the first dimension.
        out = x.new_empty(self.size * x.numel())
        _all_gather(out, x.contiguous().view(-1), group=self.handle)
        return out.view(self.size, *x.shape)

    def gather_columns(self, x: Tensor) -> Tensor:
        """Every rank's x [rows, columns] side by side, in the order of ranks: [rows, size * columns]."""
        return x if self.size == 1 else self.all_gather(x).transpose(0, 1).flatten(1)

    def share(self, count: int) -> range:
        """This rank's `count / size` of `count` equal things, in order. ValueError if they do not divide."""
        if count % self.size:
            raise ValueError(f"{count} cannot be cut over {self.size} ranks")
        each = count // self.size
        return range(self.rank * each, (self.rank + 1) * each)


SINGLE = ParallelGroup()


def connect(
    rank: int, size: int, meeting: Path, device: torch.device | str, timeout_s: float
) -> ParallelGroup:
    """Meet the other ranks of this host: NCCL for GPUs, gloo for the CPU. One group a process at a time.

    `meeting` is a file that does not exist yet, the same for all. `timeout_s` bounds how long a collective
    waits for a rank that does not come, now and later; NCCL aborts the process then. `cuda` without a number
    is the rank's own GPU, which becomes this thread's current one.
    """
    device = torch.device(device)
    if device.type == "cuda":
        device = torch.device("cuda", rank if device.index is None else device.index)
        torch.cuda.set_device(device)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nobody outside this host has a part in it
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=size,
        # NCCL waits longer: whoever watches the steps sees it first, and can end them in order.
        timeout=timedelta(seconds=timeout_s * (2 if device.type == "cuda" else 1)),
        device_id=device if device.type == "cuda" else None,
    )
    return ParallelGroup(rank, size, dist.group.WORLD)


def disconnect(patience_s: float = 10.0) -> None:
    """Leave the group that `connect` made. Safe without one.

    NCCL may wait for ever: for a rank that hangs, or for a captured graph that nobody gave up. After
    `patience_s` that is left to a thread which does not keep this process from ending.
    """
    if dist.is_initialized():
        leaving = threading.Thread(target=dist.destroy_process_group, name="leave-group", daemon=True)
        leaving.start()
        leaving.join(patience_s)
