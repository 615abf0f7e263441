"""gRPC's own thread, in processes where nothing of gRPC is running yet."""

import os
import subprocess
import sys
import threading

_CALL = """
import asyncio, os, threading
import grpc
from scheduler.poller import let_events_gather

async def main():
    let_events_gather()
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            await channel.unary_unary("/none/None")(b"")
        except grpc.aio.AioRpcError as error:
            print(error.code().name)
    await server.stop(None)
    print([os.sched_getscheduler(thread.native_id) for thread in threading.enumerate()])

asyncio.run(main())
"""
_SANDBOX = """
import os

def refuse(*_):
    raise PermissionError("not in this sandbox")

os.sched_setscheduler = refuse
"""


def may_choose() -> bool:
    """Whether this system lets a thread have the batch policy."""
    found = []

    def choose() -> None:
        try:
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_BATCH, os.sched_param(0))
        except (AttributeError, OSError):
            return
        found.append(True)

    thread = threading.Thread(target=choose)
    thread.start()
    thread.join()
    return bool(found)


def _output(program: str) -> list[str]:
    return subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60).splitlines()


def test_the_loops_thread_stays_as_it_is_and_grpcs_lets_events_gather() -> None:
    assert _output(_CALL) == ["UNIMPLEMENTED", "[0, 3]" if may_choose() else "[0, 0]"]


def test_where_it_is_not_allowed_all_goes_on_as_before() -> None:
    assert _output(_SANDBOX + _CALL) == ["UNIMPLEMENTED", "[0, 0]"]
