"""What holds while many adapters load, on any device."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.support.engines.driver import PROMPTS, Driver, greedy


def twenty_loads_leave_sixteen_streams_alone(
    make: Callable[..., Driver],
    alone: Mapping[str, Any],
    crowded: Mapping[str, Any],
    digests: Sequence[str],
    strangers: Sequence[str],
    num_tokens: int,
) -> None:
    """Some of the loads are broken. `alone` and `crowded`: settings of the engine without and with them."""
    streams = [
        greedy(f"{i}", PROMPTS[i % 4], digest=digests[i % 4], max_new_tokens=num_tokens) for i in range(16)
    ]
    expected = make(**alone).run(*streams)
    others = [*strangers, *(f"sha256:{number:064x}" for number in range(5))]
    random.Random(2).shuffle(others)
    driver = make(**crowded)
    for dispatch in streams:
        driver.engine.add(dispatch)
    driver.until(lambda: len(driver.tokens) == 16)
    for number, digest in enumerate(others):
        driver.engine.add(greedy(f"load-{number}", PROMPTS[1], digest=digest, max_new_tokens=2))
    driver.until(lambda: len(driver.finished) == 31 and len(driver.rejected) == 5)
    assert {refused.reason for refused in driver.rejected.values()} == {"ADAPTER_NOT_FOUND"}
    assert [driver.token_ids(dispatch.key) for dispatch in streams] == expected
