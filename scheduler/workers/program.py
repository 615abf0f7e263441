"""What a worker process is: jobs come in over stdin, answers go out, each job has its limits.

It imports nothing of ours. Frames on the pipes: the length in 4 bytes, then that much JSON.
"""

import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Mapping
from typing import IO, Any

FRAME_HEADER = struct.Struct("<I")
READY = b"ready"
NICENESS = 10  # A job that burns its time burns none that the event loop wants.


def serve(answer: Callable[[Mapping[str, Any]], Mapping[str, Any]], cpu_limit_s: float) -> None:
    """Answers until stdin ends. What is loaded late is to be loaded before, outside of the first job's time.

    A job that takes more CPU time than `cpu_limit_s` ends the process: SIGPROF is not handled, and no code in
    C can put it off. CPU time, because a busy machine must not fail honest jobs.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    write(sink, READY)
    while (job := _read(source)) is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
        data = json.dumps(answer(json.loads(job))).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        write(sink, data)


def write(sink: IO[bytes], data: bytes) -> None:
    sink.write(FRAME_HEADER.pack(len(data)) + data)
    sink.flush()


def _read(source: IO[bytes]) -> bytes | None:
    header = source.read(FRAME_HEADER.size)
    if len(header) < FRAME_HEADER.size:
        return None
    return source.read(FRAME_HEADER.unpack(header)[0])
