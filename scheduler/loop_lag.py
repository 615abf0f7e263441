"""How far the event loop is behind."""

import asyncio
from collections.abc import Callable
from typing import NoReturn

EVERY_S = 0.02


async def measure_lag(tell: Callable[[float], object], waited_s: Callable[[], float]) -> NoReturn:
    """Tells every 20 ms how many seconds the loop is behind, until it is cancelled: how late it is to do so,
    or how long what it has to do has waited, by `waited_s`."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + EVERY_S
        await asyncio.sleep(EVERY_S)
        tell(max(loop.time() - due, waited_s()))
