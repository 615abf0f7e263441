"""`python -m executor`: exit code 0 after a drain, 1 after a failure, 2 for unusable settings."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from adapter_store import AdapterStoreError
from executor.adapters.source import open_source
from executor.config import load_config
from executor.errors import ExecutorError, RankLost, StartError
from executor.lora.errors import LoRAError
from lorafleet.doors.logs import set_up
from lorafleet.doors.settings import ConfigError

if TYPE_CHECKING:
    from executor.app import ExecutorApp
    from executor.engine import Engine

logger = logging.getLogger("executor")


# What a wrong setting leads to, sooner or later: one clear line is enough.
START_ERRORS = (ConfigError, ExecutorError, LoRAError, AdapterStoreError)


def main(build: "Callable[..., Engine] | None" = None) -> int:
    """`build` is there for benchmarks and tests, in place of `executor.build.build_engine`."""
    # Until the loop has its own: a Ctrl-C in the seconds that torch takes is no traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        config = load_config(sys.argv[1:])
        store = open_source(config)
    except (ConfigError, StartError, AdapterStoreError) as error:
        return _complain(error)
    # Threads of one operation spin while they wait for each other, and starve whatever else the machine runs:
    # with two threads on two busy cores a step took 200 ms that takes 5.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Only now: torch takes seconds, which --help and a wrong flag need not wait for.
    from executor.app import ExecutorApp

    set_up(config.log_format, config.log_level)
    try:
        asyncio.run(_serve(ExecutorApp(config, store, build or _product())))
    except RankLost as error:
        logger.error("the executor ends: %s", error, exc_info=error.__cause__)
        from executor.ranks.leader import kill_ranks  # It was imported with the engine.

        kill_ranks()
        return 1
    except START_ERRORS as error:
        return _complain(error)
    except Exception:
        logger.exception("the executor ends")
        return 1
    return 0


def _product() -> "Callable[..., Engine]":
    from executor.build import build_engine

    return build_engine


async def _serve(app: "ExecutorApp") -> None:
    loop = asyncio.get_running_loop()
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            os._exit(1)
        app.drain()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    async with app:
        await app.wait()


def _complain(error: Exception) -> int:
    sys.stderr.write(f"executor: {error}\n")
    return 2


def _end(code: int) -> NoReturn:
    """Threads may still be in C++, waiting for a rank, say: the interpreter's own end waits for them, or
    aborts when one comes back."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _end(main())
