"""gRPC's own thread, which tells the event loop what has happened."""

import logging
import os
import threading

import grpc

logger = logging.getLogger(__name__)


def let_events_gather() -> None:
    """Keeps gRPC's thread from taking the event loop's core at each event. It is called on the loop, before
    the first object of gRPC is made.

    The thread hands the events of gRPC on to the loop. A chunk that is written is one, so it wakes for every
    token, and takes the core from the loop that writes the next one. Under Linux's batch policy it has the
    same share of the cores, but what it wakes for waits until the loop pauses, or has had its slice of some
    milliseconds, and is then handed on together.
    """
    before = set(threading.enumerate())
    grpc.aio.init_grpc_aio()
    for thread in set(threading.enumerate()) - before:
        try:
            os.sched_setscheduler(thread.native_id or 0, os.SCHED_BATCH, os.sched_param(0))
        except (AttributeError, OSError) as error:  # It is not Linux, or a sandbox that does not allow it.
            logger.debug("gRPC's thread keeps its scheduling policy: %s", error)
