"""`python -m lorafleet.child SERVICE ...` is `python -m SERVICE ...`, ending when its launcher does.

The launcher holds the other end of stdin and never writes to it, so end of file means that it is gone,
however it died; the service then drains, as it does on SIGTERM. (PR_SET_PDEATHSIG would do this on Linux
only, and for the death of the launching thread.)
"""

import os
import runpy
import signal
import sys
import threading


def main() -> None:
    threading.Thread(target=_end_with_launcher, name="launcher-watch", daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _end_with_launcher() -> None:
    os.read(sys.stdin.fileno(), 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
