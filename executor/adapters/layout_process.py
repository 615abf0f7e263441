"""The program of one layout process: it lays out adapters in memory that it shares with the executor.

layout_workers.py starts it as `python -m executor.adapters.layout_process CONNECTION MEMORY`: both are file
descriptors. It is told the executor's settings, the layout and then digests, and answers each of them. It
ends when the other end of the connection is closed, by whatever end of the executor.
"""

import logging
import mmap
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

import numpy as np

from adapter_store import WeightsSource
from executor.adapters.layout_workers import LaidOut
from executor.adapters.source import open_source
from executor.lifeline import end_with_executor
from executor.lora.image import Buffer, build_slot_image
from executor.lora.layout import SlotLayout
from lorafleet.doors.logs import set_up

logger = logging.getLogger("executor.adapters.layout_process")


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    end_with_executor(connection.fileno())  # also in the middle of a load
    buffer: Buffer = np.frombuffer(mmap.mmap(int(sys.argv[2]), 0), np.uint8)
    config = connection.recv()
    set_up(config.log_format, config.log_level)
    store = open_source(config)
    layout = connection.recv()
    while True:
        connection.send(_lay_out(connection.recv(), store, layout, buffer))


def _lay_out(digest: str, store: WeightsSource, layout: SlotLayout, buffer: Buffer) -> LaidOut | None:
    """None: the executor's own thread is to see to it, and to say what is wrong with it."""
    try:
        with store.open(digest) as weights:
            if weights.full_heads:
                return None
            image = build_slot_image(weights, layout, lambda nbytes: buffer[:nbytes])  # refuses magnitudes
            found = weights.manifest.digest
    except Exception as error:
        logger.debug("left to the executor's thread: %s", error, extra={"digest": digest})
        return None
    return LaidOut(found, image.slot_layout, image.nbytes, image.ranks, image.scales, image.error)


if __name__ == "__main__":
    with suppress(EOFError, ConnectionError):  # `end_with_executor` may come second
        main()
