"""The memory of GPUs whose times are known to the scheduler's simulator."""

from collections.abc import Mapping

from lorafleet.bench.errors import BenchError

# Bytes as CUDA tells them, rounded down.
_MEMORY: Mapping[str, int] = {"H200": 150_000_000_000}


def memory_of(card: str) -> int:
    """Bytes, whatever the case of its name. Raises BenchError with the list of those that are known."""
    for name, memory in _MEMORY.items():
        if same_card(name, card):
            return memory
    raise BenchError(f"--card {card} is not known; known are: {', '.join(_MEMORY)}")


def same_card(first: str, second: str) -> bool:
    """Whether both name the same, with or without its maker: "NVIDIA H200" is an H200."""
    one, other = (name.casefold().removeprefix("nvidia ") for name in (first, second))
    return one == other
