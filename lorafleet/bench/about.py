"""The head of a result file: the GPU, versions and command that its results were measured with."""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata

from lorafleet.bench.rows import peer_figures


def about(revision: str | None) -> Mapping[str, str | None]:
    """`revision`: what is measured, where the folder is no git checkout. Versions are None when absent."""
    return {
        "gpu": _output("nvidia-smi", *_visible(), "--query-gpu=name", "--format=csv,noheader"),
        "cpus": f"{len(os.sched_getaffinity(0))} x {platform.machine()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "triton": _version("triton"),
        "git": revision or _output("git", "rev-parse", "HEAD"),
        "command": shlex.join(["lorafleet", *sys.argv[1:]]),
        "peer": str(peer_figures()["source"]),
    }


def _visible() -> tuple[str, ...]:
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (f"--id={devices}",) if devices else ()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None if done.returncode == 0 else None
