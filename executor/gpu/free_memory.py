"""Host memory that this process may still take, by what the machine and the container have left."""

from pathlib import Path


def free_host_memory(root: Path = Path("/")) -> int:
    """In bytes: Linux's MemAvailable, or less where the control group (version 2) has a limit."""
    meminfo = (root / "proc/meminfo").read_text()
    available = next(line for line in meminfo.splitlines() if line.startswith("MemAvailable:"))
    free = 1024 * int(available.split()[1])
    group = root / "sys/fs/cgroup"
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - int(used)))
