"""Processes that end with the executor, here with this one's end of a pipe."""

import os
import subprocess
import sys

import pytest

from tests.support.services.cluster import wait_until
from tests.support.services.processes import is_running

PROCESS = """
import os, subprocess, sys
from executor.lifeline import end_with_executor
end_with_executor(int(sys.argv[1]), with_group=sys.argv[2] == "group")
with subprocess.Popen(["sleep", "600"]) as started:
    print(started.pid, flush=True)
"""


@pytest.mark.parametrize("scope", ["group", "alone"])
def test_a_process_ends_with_the_other_end(scope: str) -> None:
    """And what it has started, where it has a group of its own: not who else is in this one."""
    watched, held = os.pipe()
    command = [sys.executable, "-c", PROCESS, str(watched), scope]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[watched]) as process:
        assert process.stdout
        started = int(process.stdout.readline())
        assert process.poll() is None and is_running(started)
        os.close(held)
        process.wait(60)
    os.close(watched)
    if scope == "group":
        wait_until(lambda: not is_running(started), "it ends")
    else:
        assert is_running(started)
        os.kill(started, 9)
