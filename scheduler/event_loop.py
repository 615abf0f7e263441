"""The event loop: which one it is, and how far it is behind."""

import asyncio
from collections.abc import Callable
from typing import NoReturn, cast

EVERY_S = 0.02


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed: it needs less for each turn. None is asyncio's own."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return None
    return cast(Callable[[], asyncio.AbstractEventLoop], new_event_loop)


async def measure_lag(tell: Callable[[float], object], waited_s: Callable[[], float]) -> NoReturn:
    """Tells every 20 ms how many seconds the loop is behind, until it is cancelled: how late it is to do so,
    or how long what it has to do has waited, by `waited_s`."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + EVERY_S
        await asyncio.sleep(EVERY_S)
        tell(max(loop.time() - due, waited_s()))
