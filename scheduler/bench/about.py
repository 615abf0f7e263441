"""What a result file says of its making."""

import os
import platform
import subprocess
import sys


def about(module: str) -> dict[str, str]:
    """Revision, command and machine, for a measurement that `python -m module` makes."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "git": git.stdout.strip(),
        "command": " ".join(["python -m", module, *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
    }
