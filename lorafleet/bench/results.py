"""The file of a measurement: a head that says what was measured with what, and rows as they come."""

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any


def head(program: str, revision: str | None = None) -> dict[str, Any]:
    """Revision, command, machine and versions (None when absent) of what `program` measures.

    program: as it is called, without its arguments. revision: where the folder is no git checkout. Take the
    head before a long measurement: others may commit meanwhile.
    """
    return {
        "gpu": _output("nvidia-smi", *_visible(), "--query-gpu=name", "--format=csv,noheader"),
        "cpus": f"{len(os.sched_getaffinity(0))} x {platform.machine()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "triton": _version("triton"),
        "git": revision or _output("git", "rev-parse", "HEAD"),
        "command": f"{program} {shlex.join(sys.argv[1:])}".rstrip(),
    }


def write(file: Path, whole: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(whole, indent=1) + "\n")


def say(row: Mapping[str, Any]) -> None:
    """The row as a line, at once: whoever watches a long measurement sees where it is."""
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


class Results:
    """Rows that are in their file, and said, as soon as they are measured."""

    def __init__(self, file: Path, head: Mapping[str, Any]) -> None:
        self._file, self._head = file, head
        self.rows: list[Mapping[str, Any]] = []

    def add(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)
        write(self._file, {**self._head, "rows": self.rows})
        say(row)


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
