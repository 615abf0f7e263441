"""How long the event loop takes for what waits for it."""

import asyncio
from collections.abc import Callable
from typing import NoReturn

EVERY_S = 0.02


async def measure_turns(tell: Callable[[float], object]) -> NoReturn:
    """Tells every 20 ms the seconds of the latest turn, until it is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + EVERY_S
        await asyncio.sleep(EVERY_S)
        begun = loop.time()
        await asyncio.sleep(0)  # until the next turn
        tell(max(loop.time() - begun, begun - due))
