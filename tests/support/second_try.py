"""A shared fixture that failed once is made again for the next test that wants it.

On a busy machine a fleet may not start in time. pytest alone would hand its error to all tests after the
first, of the whole module or session.
"""

from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

_TRIES = 3
_failed: Counter[str] = Counter()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    try:
        return (yield)
    except Exception:
        name = f"{fixturedef.baseid}::{fixturedef.argname}"
        _failed[name] += 1
        if fixturedef.scope != "function" and _failed[name] < _TRIES:
            fixturedef.finish(request)  # type: ignore[arg-type]  # it is a SubRequest
        raise
