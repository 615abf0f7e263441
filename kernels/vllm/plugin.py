"""vLLM's plugin: its LoRA layers call our wrapper, and its compile cache knows that they do."""

import functools
import hashlib
import logging
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

STOCK = "vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU"

# A child of vLLM's own logger, which has its handlers and level.
_log = logging.getLogger("vllm.lorafleet")


def register() -> None:
    """vLLM calls this in every process before it builds an engine, perhaps more than once.

    Where our wrapper cannot stand in, one log line says why, and vLLM goes on with its own kernels. No error
    leaves this function: vLLM would not start.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        _log.info("lorafleet is not used: this platform is not CUDA")
        return
    try:
        wrapper = _fitting(current_platform)
    except Exception as error:
        reason = str(error) if isinstance(error, _DoesNotFit) else f"{type(error).__name__}: {error}"
        _log.warning("lorafleet is not used, vLLM's own LoRA kernels are: %s", reason)
        return
    _enter(current_platform, wrapper)
    _log.info("LoRA runs on lorafleet's kernels (%s)", wrapper)


class _DoesNotFit(Exception):
    """Says why ours cannot stand in for what is installed."""


def _fitting(platform: Any) -> str:
    """The name of our wrapper that fits what is installed. Raises _DoesNotFit, or what reading it raises."""
    import vllm
    from vllm import envs
    from vllm.config.lora import LoRAConfig

    # Imported here: a plugin that cannot be imported is to be told of like any other.
    from kernels.vllm.reference_check import WRAPPERS, lacks

    ours = {f"{wrapper.__module__}.{wrapper.__qualname__}": wrapper for wrapper in WRAPPERS}
    named = platform.get_punica_wrapper()
    if named not in (STOCK, *ours):
        raise _DoesNotFit(f"the platform names a wrapper of its own, {named}")
    if not callable(getattr(LoRAConfig, "compute_hash", None)):
        raise _DoesNotFit("LoRAConfig has no compute_hash, so its compile cache would not tell the two apart")
    if getattr(envs, "VLLM_BATCH_INVARIANT", False):
        raise _DoesNotFit(
            "VLLM_BATCH_INVARIANT is set, but a step's size decides in what order lorafleet sums"
        )
    missing = {name: lacks(Path(vllm.__file__).parent, wrapper) for name, wrapper in ours.items()}
    nearest = min(missing, key=lambda name: len(missing[name]))
    if missing[nearest]:
        installed = getattr(vllm, "__version__", "of unknown version")
        raise _DoesNotFit(f"vLLM {installed} needs what lorafleet lacks: {', '.join(missing[nearest])}")
    return nearest


def _enter(platform: Any, wrapper: str) -> None:
    from vllm.config.lora import LoRAConfig

    stock = LoRAConfig.compute_hash
    # The cache first: never our wrapper under the key of stock artefacts.
    if not hasattr(stock, "lorafleet"):
        LoRAConfig.compute_hash = _with_identity(stock)
    type(platform).get_punica_wrapper = classmethod(lambda cls: wrapper)


def _with_identity(stock: Callable[[Any], str]) -> Callable[[Any], str]:
    ours = identity()

    @functools.wraps(stock)
    def compute_hash(self: Any) -> str:
        return hashlib.sha256(f"{stock(self)} {ours}".encode()).hexdigest()

    compute_hash.lorafleet = ours  # type: ignore[attr-defined]
    return compute_hash


def identity() -> str:
    """Our name, version, and a hash of this folder's source: what a compiler traces when it traces us."""
    try:
        released = version("lorafleet")
    except PackageNotFoundError:
        released = "not installed"
    files = sorted(Path(__file__).parent.rglob("*.py"))
    source = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
    return f"lorafleet {released} {source}"
