"""Versions that another scheduler withdrew, of which this one has nothing left but series of metrics."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from adapter_store import DiskStore, ModelSpec, Ref
from scheduler.adapters.retirement import LOOK_EVERY_S, WATCHED_S, Retirement
from scheduler.admission.versions import Versions
from scheduler.text.tokenizer import Tokenizer
from tests.support.services.fakes import ManualClock
from tests.support.services.scheduling import dispatcher_of


async def test_what_was_served_is_looked_at_now_and_then(
    store: DiskStore, spec: ModelSpec, tokenizer: Tokenizer, peft_folder: Callable[..., Path]
) -> None:
    kept, going = (store.put(peft_folder(n), "acme", f"a{n}", spec).digest for n in (1, 2))
    served = {("acme/a1", kept), ("acme/a2", going)}
    gone: list[tuple[str, str]] = []
    clock, pool, versions = ManualClock(), ThreadPoolExecutor(1), Versions(store)
    retirement = Retirement(
        store,
        versions,
        dispatcher_of([], tokenizer),
        pool,
        clock,
        lambda adapter, digest: gone.append((adapter, digest)),
        lambda: sorted(served.difference(gone)),
    )
    await retirement.tick()
    store.withdraw(Ref("acme", "a2", digest=going), force=True)
    versions.ask()
    await retirement.tick()
    assert gone == [], "nobody told, and it was looked at just now"
    clock.advance(LOOK_EVERY_S)
    await retirement.tick()
    assert gone == [], "copies are dropped for a while"
    clock.advance(WATCHED_S)
    for _ in range(3):
        await retirement.tick()
        clock.advance(LOOK_EVERY_S)
    assert gone == [("acme/a2", going)]
    pool.shutdown()
