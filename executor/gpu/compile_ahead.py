"""Compiles kernels ahead of a first start, by several processes at once, each a share of them.

Triton compiles a kernel when it is first launched, one after another: about three minutes for all that an
executor may launch. Here each process launches some of them, with a model of one layer and the same shapes,
and leaves what it compiled in Triton's cache, where the executor then finds it. FlashInfer's two forms of
attention take nvcc over a minute each, on their first start on a machine: they have a process each, of which
nvcc compiles as many files at once as host memory has room for. The sampler's kernels have one, too.
"""

import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import triton

import kernels
from executor.config import ExecutorConfig
from executor.gpu.attention.flashinfer import FORMS
from executor.gpu.free_memory import free_host_memory
from executor.start_log import start_part

logger = logging.getLogger(__name__)

_MOST_PROCESSES = 8
_LIMIT_S = 600.0
# Of host memory for a file that nvcc compiles: its compilers took up to 3.7 GB each, 28 GB together.
_NVCC_BYTES = 4 << 30
# Folders of kernels/ that no executor launches anything of, nor takes a constant from.
_NOT_LAUNCHED = frozenset({"bench", "vllm"})
# Settings that choose what is compiled.
_SETTINGS = (
    "dtype", "lora_dtype", "lora_modules", "max_loras", "max_lora_rank", "max_seats", "max_batched_tokens",
    "max_model_len", "block_size", "cuda_graphs", "captured_rows",
)  # fmt: skip

Command = Sequence[str]


class Compilation:
    """The compilation of all kernels that an executor with these settings launches, on this machine."""

    def __init__(self, config: ExecutorConfig, cache: Path | None = None) -> None:
        folder = cache or Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
        self._config = config
        self._marker = folder / f"lorafleet-{_key(config)}"

    def start(self, run: Callable[[Command, str], str] | None = None) -> None:
        """Fill the cache, unless it was filled before. What goes wrong is logged, and left to the executor.

        `run` starts a process with this standard input, and returns the last line of what it says when it
        fails, "" otherwise.
        """
        parts = self._config.compile_processes or min(_MOST_PROCESSES, (os.cpu_count() or 1) // 2)
        if parts < 2 or self._marker.exists():
            return
        settings = json.dumps(asdict(replace(self._config, store="unused")))
        shares = _shares(parts)
        names = tuple(share.name for share in shares)
        with (
            start_part("compiling kernels, as none are yet, in processes", len(shares), names) as part,
            ThreadPoolExecutor(len(shares)) as pool,
        ):

            def compile_share(share: _Share) -> str:
                said = (run or _run)(share.command, settings)
                part.advance(share.name)
                return said

            said = list(pool.map(compile_share, shares))
        for line in filter(None, said):
            logger.warning("compiling ahead failed, kernels are compiled one by one: %s", line)

    def done(self) -> None:
        """Everything is compiled now: starts like this one need not look any more."""
        try:
            self._marker.parent.mkdir(parents=True, exist_ok=True)
            self._marker.touch()
        except OSError as error:
            logger.warning("the next start compiles again: %s", error)


@dataclass(frozen=True, slots=True)
class _Share:
    """What a process compiles: for people, and as it is told."""

    name: str
    what: str
    which: str

    @property
    def command(self) -> Command:
        return sys.executable, "-m", "executor.gpu.compile_process", self.what, self.which


def _shares(parts: int) -> list[_Share]:
    attention = [_Share(f"FlashInfer's {form} (nvcc)", "attention", form) for form in FORMS]
    others = [_Share(f"part {part + 1} of Triton's", str(part), str(parts)) for part in range(parts)]
    return [*attention, _Share("the sampler", "sampler", "all"), *others]


def _key(config: ExecutorConfig) -> str:
    digest = hashlib.sha256()
    steps = [Path(__file__).with_name(name) for name in ("graph_plans.py", "warm_up.py")]
    for file in (*_kernel_files(), *steps):
        digest.update(file.read_bytes())
    digest.update((Path(config.model) / "config.json").read_bytes())
    chosen = [str(getattr(config, name)) for name in _SETTINGS]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = triton.__version__, torch.__version__, _flashinfer_version()
    digest.update("\0".join((*chosen, *versions, gpu)).encode())
    return digest.hexdigest()[:32]


def _kernel_files() -> list[Path]:
    """All that decides what is compiled: ops, what they share, how launches are chosen, and the references,
    whose constants some kernels have."""
    root = Path(kernels.__file__).parent
    files = (file for pattern in ("[!.]*.py", "[!.]*.c") for file in root.rglob(pattern))
    return sorted(file for file in files if file.relative_to(root).parts[0] not in _NOT_LAUNCHED)


def _flashinfer_version() -> str:
    """Empty where it is not installed."""
    try:
        return version("flashinfer-python")
    except PackageNotFoundError:
        return ""


def _nvcc_jobs() -> str:
    """Files at once, for each of the forms."""
    return str(max(1, min(os.cpu_count() or 1, free_host_memory() // (len(FORMS) * _NVCC_BYTES))))


def _run(command: Command, settings: str) -> str:
    watched, held = os.pipe()
    try:
        done = subprocess.run(
            (*command, str(watched)), input=settings, capture_output=True, text=True, timeout=_LIMIT_S,
            check=False, pass_fds=(watched,), env={"MAX_JOBS": _nvcc_jobs()} | os.environ,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        os.close(watched)
        os.close(held)
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1] if done.returncode else ""
