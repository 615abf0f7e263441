"""Before anything imports triton: without a GPU its kernels run in its interpreter."""

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
