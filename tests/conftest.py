"""Before torch or triton is imported, here and in the processes that tests start."""

import os
import signal
from importlib.util import find_spec
from pathlib import Path

from hypothesis import HealthCheck, settings

# Test workers and services share few cores, and the threads of one torch operation wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# gRPC tells of connections that end, which tests end all the time; what it means comes as a status, too.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# Without a GPU, Triton's kernels run in its interpreter, which it decides on while it is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# How long an example takes says something of the machine, and nothing of what is tested.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# A shell that starts the tests in the background ignores interrupts for them and for what they start in turn.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    from tests.support.interpreter import quicken

    quicken()

pytest_plugins = ["tests.support.sharing", "tests.support.second_try"]
