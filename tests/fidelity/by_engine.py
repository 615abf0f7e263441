"""Streams by an engine in the test's own process, against what transformers + PEFT answer."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from adapter_store import DiskStore, ModelSpec
from tests.fidelity.conftest import NUM_TOKENS, Expected, Stream
from tests.support.engines.compilations import compilations
from tests.support.engines.driver import Driver, greedy, make_driver


def assert_engine_equals(
    expect: Callable[..., Expected], model: Path, streams: Sequence[Stream], folder: Path, **settings: Any
) -> Driver:
    """All streams at once, adapters from a store in `folder`; `settings` are the executor's. Returns the
    driver, whose engine has ended, for more questions."""
    store, spec = DiskStore(folder), ModelSpec.from_folder(model)
    digests = {
        stream.name: store.put(stream.adapter, "default", stream.name, spec).digest if stream.adapter else ""
        for stream in streams
    }
    driver = make_driver(str(model), store, store=str(folder), torch_threads=1, **settings)
    with closing(driver.engine), compilations() as compiled:
        answers = driver.run(
            *(
                greedy(s.name, s.prompt, digest=digests[s.name], max_new_tokens=NUM_TOKENS, logprobs=0)
                for s in streams
            )
        )
    assert not compiled, "once it is ready"
    expected = expect(model, streams, answers)
    for stream, tokens in zip(streams, answers, strict=True):
        assert tokens == expected[stream.name].tokens, stream.name
        got = [token.token.logprob for token in driver.tokens[0, stream.name]]
        assert got == pytest.approx(expected[stream.name].logprobs, abs=1e-4), stream.name
    return driver
