"""One tenant's operator: versions come, are pinned and asked for, and go again; aliases of others move."""

import random
import time
from collections.abc import Callable
from pathlib import Path

from lorafleet import Client, LoraFleetError, Unavailable
from tests.support.services.cluster import PATIENCE_S
from tests.support.soak.causes import Cause
from tests.support.soak.tenants import BRIEF, Tenant, write_variant

CALL_S = 15.0
MOST_BRIEF = 3
OF_OPERATORS = (Cause.STORE_AWAY, Cause.SCHEDULER_AWAY, Cause.EXECUTOR_AWAY, Cause.WITHDRAWN)


class Operator:
    """It begins `pause_s` after the end of what it did last."""

    def __init__(self, tenant: Tenant, folder: Path, seed: int, pause_s: float) -> None:
        self._tenant, self._folder, self._pause_s = tenant, folder, pause_s
        self._draw, self._number = random.Random(seed), 0

    def run(self) -> None:
        acts = (self._push, self._move, self._pin, self._withdraw, self._check)
        first = self._draw.randrange(len(self._tenant.addresses))
        with self._tenant.client(first, timeout=CALL_S) as client:
            while self._tenant.goes_on:
                [act] = self._draw.choices(acts, (4, 4, 2, 3, 1))
                if len(self._tenant.brief) > MOST_BRIEF:
                    act = self._withdraw
                self._try(lambda act=act: act(client))  # type: ignore[misc]
                self._tenant.causes.did(f"operator: {act.__name__.strip('_')}")
                self._tenant.stops.wait(self._draw.uniform(0, 2 * self._pause_s))

    def _try(self, call: Callable[[], object]) -> bool:
        asked_at = time.monotonic()
        try:
            call()
        except LoraFleetError as error:
            self._tenant.judge(error, asked_at, f"operator: {error}", OF_OPERATORS)
            return False
        return True

    def _push(self, client: Client) -> None:
        """A version that nobody ever had. No alias names it: whoever asks for it knows its answers."""
        original = self._draw.choice([*self._tenant.digests])
        self._number += 1
        folder = self._folder / f"{self._tenant.tenant}-{self._number}"
        write_variant(self._tenant.digests[original], folder, self._draw.randrange(1 << 60))
        digest = client.adapters.push(folder, BRIEF, alias="").version.digest
        self._tenant.learn_variant(digest, original)
        self._tenant.brief.append(digest)

    def _move(self, client: Client) -> None:
        name, digest = self._draw.choice(self._tenant.names), self._draw.choice([*self._tenant.digests])
        self._tenant.aliases.changing(name, digest)
        client.adapters.set_alias(f"{name}@latest", digest)
        self._tenant.aliases.changed(name, digest)

    def _pin(self, client: Client) -> None:
        if self._tenant.brief:
            ref = f"{BRIEF}@{self._draw.choice(self._tenant.brief)}"
            client.adapters.pin(ref, tier="host")
            self._tenant.stops.wait(self._pause_s)
            client.adapters.unpin(ref)

    def _withdraw(self, client: Client) -> None:
        """Drained first or not, removed at once or not; and what was removed before is collected."""
        if not self._tenant.brief:
            return
        digest = self._draw.choice(self._tenant.brief)
        ref, now = f"{BRIEF}@{digest}", self._draw.random() < 0.5
        self._tenant.causes.from_now_on(Cause.WITHDRAWN, digest)
        if now:
            self._tenant.causes.from_now_on(Cause.REMOVED, digest)
        elif self._draw.random() < 0.5:
            self._try(lambda: client.adapters.drain(ref))
        self._try(lambda: client.adapters.delete(ref, force=True, now=now))
        self._tenant.brief.remove(digest)  # Only now: guests may well ask for it meanwhile.
        client.adapters.collect()

    def _check(self, client: Client) -> None:
        self._draw.choice((client.adapters.list, client.adapters.residency, client.adapters.verify))()

    def clear(self) -> None:
        """No brief version is left. To be called once nothing is done to the fleet any more."""
        ends = time.monotonic() + PATIENCE_S
        with self._tenant.client(0, timeout=CALL_S) as client:
            while True:
                try:
                    return self._delete_all(client)
                except Unavailable:  # Who was away is not known to be back at once.
                    assert time.monotonic() < ends, "what was away does not come back"
                    time.sleep(0.1)

    def _delete_all(self, client: Client) -> None:
        self._tenant.brief.clear()
        for version in client.adapters.list(BRIEF):
            if version.state != "deleted":
                client.adapters.delete(f"{BRIEF}@{version.digest}", force=True)
