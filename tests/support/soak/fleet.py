"""The services that are soaked: two schedulers, three executors behind a file, a Redis, three tenants."""

import hashlib
import os
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from scheduler.text.tokenizer import Tokenizer
from tests.support.adapters.peft import load_base, make_adapter
from tests.support.chaos.elastic import InFile
from tests.support.chaos.run import Aliases
from tests.support.services.cluster import Cluster, Node, Pair
from tests.support.soak.causes import Causes
from tests.support.soak.tenants import STEADY, Tenant
from tests.support.stores.redis_server import RedisServer

QUOTAS = Path(__file__).with_name("quotas.toml")
COLLECTED_S = 45.0  # Longer than the lease of a scheduler that is gone.
RIGHTS = '["infer", "push", "manage", "operate"]'
# Less room than all versions and requests would have: what is paged, preempted and queued may leak, too.
ROOM = ("--max-loras", "3", "--max-lora-rank", "8", "--max-seats", "8", "--num-kv-blocks", "260")
STEPS = ("--block-size", "8", "--max-batched-tokens", "48", "--max-model-len", "1024")
TIERS = ("--adapter-aging", "0.3", "--host-memory-bytes", "900000")


@dataclass(frozen=True)
class Size:
    """Of a fleet, and of what its guests and operators do.

    warm_s  traffic before anything is counted: it makes what is made once, as pools and processes are
    deaf_s  for how long those do not read who are deaf; 0: nobody is
    quotas  those of quotas.toml, which the last tenant goes beyond
    ledger  each scheduler keeps one
    """

    schedulers: int = 2
    executors: int = 3
    tenants: int = 3
    warm_s: float = 4.0
    adapters: int = 3
    guests: int = 3
    guest_pause_s: float = 0.6
    operator_pause_s: float = 2.0
    breaker_pause_s: float = 12.0
    deaf_s: float = 15.0
    delete_grace_s: float = 5.0
    slow_client_s: float = 3.0
    quotas: bool = False
    ledger: bool = False


class Fleet:
    """The first scheduler and the first executor are never restarted: what leaks can grow there."""

    def __init__(self, cluster: Cluster, size: Size) -> None:
        self.size, self.folder, self._stack = size, cluster.folder, ExitStack()
        self.redis = RedisServer(cluster.folder / "redis")
        self.spool = cluster.folder / "spool"
        self.causes, self.stops = Causes(), threading.Event()
        self._tokens = {f"tenant-{number}": f"token-{number}" for number in range(size.tenants)}
        self._place = InFile(cluster.folder / "executors")
        cluster.store_url = self._stack.enter_context(self.redis).url
        self.executors = [self._executor(cluster, number) for number in range(size.executors)]
        self.schedulers = [self._scheduler(cluster, number) for number in range(size.schedulers)]
        self.model = cluster.model
        self.tenants: list[Tenant] = []

    def _executor(self, cluster: Cluster, number: int) -> Node:
        cached = ("--cache-dir", str(cluster.folder / f"cache-{number}"), "--cache-bytes", "120000")
        return cluster.executor(f"executor-{number}", *ROOM, *STEPS, *TIERS, *(cached if number % 2 else ()))

    def _scheduler(self, cluster: Cluster, number: int) -> Node:
        tokens = cluster.folder / "tokens.toml"
        tokens.write_text("".join(_entry(tenant, token) for tenant, token in self._tokens.items()))
        name = f"scheduler-{number}"
        more = ("--tenants-file", str(QUOTAS)) if self.size.quotas else ()
        if self.size.ledger:
            more += ("--ledger-dir", str(cluster.folder / f"ledger-{name}"))
        node = cluster.scheduler(
            name,
            [self._place.flag],
            *("--tokens-file", str(tokens), "--discovery-interval", "1", "--slow-start", "1"),
            *("--slow-client-timeout", str(self.size.slow_client_s), "--drain-timeout", "5"),
            *("--delete-grace", str(self.size.delete_grace_s), *more),
        )
        spool = self.spool / node.name
        spool.mkdir(parents=True)
        node.environment |= {"TMPDIR": str(spool), "MALLOC_ARENA_MAX": "2"}  # The second as in its image.
        return node

    @property
    def nodes(self) -> list[Node]:
        return [*self.executors, *self.schedulers]

    def __enter__(self) -> Self:
        self.tell(len(self.executors))
        for node in self.nodes:
            node.start()
        for node in self.nodes:
            node.wait_ready()
        return self

    def __exit__(self, *error: object) -> None:
        for node in self.nodes:
            node.terminate()
        for node in self.nodes:
            node.stop()
        self._stack.close()

    def tell(self, count: int) -> None:
        """The executors are the first ones from now on."""
        self._place.tell(self.executors[:count])

    def learn(self, seconds: float) -> None:
        """What all tenants know, on a quiet fleet; from then on they have so many seconds."""
        tokenizer, base = Tokenizer.from_folder(self.model), load_base(self.model)
        folders = [
            make_adapter(self.folder / f"soak-{number}", base, seed=number, rank=2 + number)
            for number in range(self.size.adapters)
        ]
        self.tenants = [self._tenant(name, token, tokenizer) for name, token in self._tokens.items()]
        first = self.tenants[0]
        for tenant in self.tenants:
            with tenant.client(0, timeout=60) as client:
                if tenant is first:
                    tenant.learn(client, folders)
                tenant.digests, tenant.truth = first.digests, first.truth
                tenant.push(client)
        for tenant in self.tenants:
            tenant.ends_at = time.monotonic() + seconds

    def _tenant(self, name: str, token: str, tokenizer: Tokenizer) -> Tenant:
        return Tenant(
            [node.address for node in self.schedulers],
            tokenizer,
            truth={},
            digests={},
            aliases=Aliases({each: [] for each in STEADY}),
            ends_at=0.0,
            names=STEADY,
            causes=self.causes,
            tenant=name,
            token=token,
            is_limited=self.size.quotas and name == [*self._tokens][-1],
            stops=self.stops,
        )

    def wait_idle(self) -> None:
        """Nobody holds anything, and what operators deleted is gone, if that happens in time."""
        for scheduler in self.schedulers:
            for executor in self.executors:
                Pair(scheduler, executor).wait_idle()
        ends = time.monotonic() + COLLECTED_S
        with ExitStack() as stack, self.redis.client() as redis:
            clients = [stack.enter_context(tenant.client(0, timeout=60)) for tenant in self.tenants]
            while len(list(redis.scan_iter("*blob:*"))) > self.size.adapters and time.monotonic() < ends:
                for client in clients:
                    client.adapters.collect()
                time.sleep(0.2)

    def left(self) -> list[str]:
        """Content that no steady version has and that is still stored, and which executors have copies."""
        with (
            self.tenants[0].client(0, timeout=60) as client,
            self.redis.client(decode_responses=True) as redis,
        ):
            stored = {key.partition("blob:")[2] for key in redis.scan_iter("*blob:*")}
            copies = [f"{copy.executor}: {copy}" for copy in client.adapters.residency()]
            return [
                f"{digest} of {redis.smembers(key)} is stored: {[each for each in copies if digest in each]}"
                for digest in sorted(stored - self.tenants[0].digests.keys())
                for key in redis.scan_iter(f"*users:{digest}")
            ]

    def spooled(self) -> tuple[int, int]:
        """Files of pushes and pulls there, and their bytes. They may go while they are counted."""
        files = [Path(folder, name) for folder, _, names in os.walk(self.spool) for name in names]
        return len(files), sum(_size(file) for file in files)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # It has gone.
        return 0


def _entry(tenant: str, token: str) -> str:
    hashed = hashlib.sha256(token.encode()).hexdigest()
    return f'[[tokens]]\nsha256 = "{hashed}"\ntenant = "{tenant}"\nrights = {RIGHTS}\n'
