"""Before torch or triton is imported, here and in the processes that tests start."""

import os
from pathlib import Path

# Test workers and services share few cores, and the threads of one torch operation wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Without a GPU, Triton's kernels run in its interpreter, which it decides on while it is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
