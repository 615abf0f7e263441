"""Every kernel compiles for the cards that are served, also where there is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


# sm_89: what FP8 needs of it alone.
@pytest.mark.parametrize("arch", ["80", "89", "90"])
def test_every_kernel_compiles(arch: str, tmp_path: Path) -> None:
    # A process of its own: this one's kernels may be interpreted.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.compile_ahead", arch]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout, "no case was compiled"
