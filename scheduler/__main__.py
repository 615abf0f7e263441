"""`python -m scheduler`: reads its settings, serves, and drains on SIGTERM."""

import asyncio
import gc
import logging
import signal
import sys

from adapter_store import AdapterStoreError
from lorafleet.constraints.tokens import InvalidTokenizer
from lorafleet.doors.logs import set_up
from lorafleet.doors.settings import ConfigError
from lorafleet.garbage import QuietCollector
from lorafleet.tls.files import TlsError
from scheduler.app import CannotListen, Scheduler
from scheduler.config import Config, load_config
from scheduler.event_loop import loop_factory
from scheduler.poller import let_events_gather
from scheduler.watched_file import InvalidFile

logger = logging.getLogger(__name__)

CANNOT_START = 2
START_ERRORS = (ConfigError, AdapterStoreError, InvalidTokenizer, InvalidFile, TlsError, CannotListen)
# Seconds. A thread that looks an adapter up gives the interpreter away with every file it touches, and waits
# so long to get it back from a busy event loop: with Python's 5 ms, several times over, for each of the
# requests that come together.
SWITCH_INTERVAL_S = 0.0005
COLLECT_INTERVAL_S = 1.0
# Objects that are made before the youngest are looked through. A step of many streams makes thousands that it
# soon drops: of Python's 700 a good part was looked at in vain.
YOUNG_OBJECTS = 20_000


def main() -> int:
    """The exit status: 0 after a drain, 2 when it cannot start."""
    try:
        config = load_config(sys.argv[1:])
        set_up(config.log_format, config.log_level)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gc.set_threshold(YOUNG_OBJECTS)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_serve(config))
    except START_ERRORS as error:
        sys.stderr.write(f"scheduler: {error}\n")
        return CANNOT_START
    return 0


async def _serve(config: Config) -> None:
    """Until the first SIGTERM or SIGINT, then drains; a second one cuts the drain short."""
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    let_events_gather()
    scheduler = Scheduler(config)
    await scheduler.start()
    logger.info("event loop: %s", type(loop).__module__.partition(".")[0])
    collecting = asyncio.create_task(_collect_when_idle(scheduler))
    await signals.get()
    drained = asyncio.create_task(scheduler.drain())
    impatient = asyncio.create_task(signals.get())
    await asyncio.wait([drained, impatient], return_when=asyncio.FIRST_COMPLETED)
    for task in (drained, impatient, collecting):
        task.cancel()
    await scheduler.stop()
    logger.info("stopped")


async def _collect_when_idle(scheduler: Scheduler) -> None:
    """A full collection takes 60 ms of all that is there at the start, and as long for 1,500 requests that
    wait."""
    collector = QuietCollector()
    collector.start()
    try:
        while True:
            await asyncio.sleep(COLLECT_INTERVAL_S)
            if not scheduler.dispatcher.num_live:
                collector.idle()
    finally:
        collector.stop()


if __name__ == "__main__":
    sys.exit(main())
