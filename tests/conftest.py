"""Before torch is imported, here and in the processes that tests start: one thread for each of them."""

import os

# Test workers and services share few cores, and the threads of one torch operation wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
