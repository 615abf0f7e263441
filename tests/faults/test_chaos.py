"""Everything at once, for some seconds: whatever ends well is the answer of the adapter that was asked for,
alone; everything else ends with a typed error; nothing is left. `make chaos` goes on for longer.
"""

import logging
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lorafleet import Client
from scheduler.text.tokenizer import Tokenizer
from tests.support.adapters.peft import load_base, make_adapter
from tests.support.chaos.run import NAMES, Aliases, World, know, together
from tests.support.chaos.traffic import Caller
from tests.support.chaos.trouble import Breaker, Operator
from tests.support.services.cluster import Cluster, Pair, wait_until

logger = logging.getLogger(__name__)

SECONDS = float(os.environ.get("CHAOS_SECONDS", "5"))
SEED = int(os.environ.get("CHAOS_SEED", "1"))
NUM_CALLERS = 10
# Steps that most prompts need several of.
STEPS = ("--block-size", "8", "--max-batched-tokens", "32", "--max-model-len", "200")
SLOTS = ("--max-lora-rank", "8", "--adapter-aging", "0.3", "--host-memory-bytes", "900000")
SCHEDULER = ("--aging", "0.3", "--delete-grace", "0", "--queue-timeout", "60", "--drain-timeout", "2")


@pytest.fixture(scope="module")
def folders(model: Path) -> list[Path]:
    base = load_base(model)
    return [
        make_adapter(model.parent / f"chaos-{number}", base, seed=number, rank=2 + number)
        for number in range(5)
    ]


def room(draw: random.Random) -> list[str]:
    """Fewer slots than adapters, and blocks for fewer of the longest requests than there are seats."""
    slots, seats, blocks = draw.randint(1, 3), draw.randint(2, 8), draw.randint(26, 60)
    return ["--max-loras", f"{slots}", "--max-seats", f"{seats}", "--num-kv-blocks", f"{blocks}"]


def test_whatever_happens(cluster: Cluster, model: Path, folders: list[Path]) -> None:
    draw = random.Random(SEED)
    executors = [
        cluster.executor(f"chaos-{name}", *STEPS, *SLOTS, *room(draw), *arguments).start()
        for name, arguments in (
            ("ahead", ("--async-scheduling", "true")),
            ("cached", ("--cache-dir", str(cluster.folder / "cache"), "--cache-bytes", "60000")),
        )
    ]
    schedulers = [
        cluster.scheduler(f"chaos-scheduler-{number}", executors, *SCHEDULER).start() for number in range(2)
    ]
    nodes = [*executors, *schedulers]
    for node in nodes:
        node.wait_ready()
    with Client(schedulers[0].address, timeout=60) as client:
        digests, truth = know(client, folders)
        aliases = Aliases()
        for name in NAMES:
            for digest, folder in digests.items():
                aliases.changing(name, digest)
                client.adapters.push(folder, name)
                aliases.changed(name, digest)
    world = World(
        [node.address for node in schedulers],
        Tokenizer.from_folder(model),
        truth,
        digests,
        aliases,
        time.monotonic() + SECONDS,
    )
    runs: list[Callable[[], None]] = [Caller(world, SEED * 1000 + n).run for n in range(NUM_CALLERS)]
    runs += [Operator(world, SEED * 1000 + 500).run, Breaker(world, nodes, SEED * 1000 + 501).run]
    together(runs, 120, world)
    logger.warning("%s", sorted(world.outcomes.items()))
    assert not world.problems, world.problems[0]
    assert world.outcomes["length"] > SECONDS, "hardly anything was answered"
    for scheduler in schedulers:
        for executor in executors:
            Pair(scheduler, executor).wait_idle()
        with Client(scheduler.address, timeout=60) as client:
            leave_nothing_pinned(client, world)
    with Client(schedulers[0].address, timeout=60) as client:
        assert know(client, folders) == (digests, truth)
    for node in nodes:
        for word in ("Traceback", "internal error", "bug"):
            assert word not in node.log(), f"{node.name}: {word}"


def leave_nothing_pinned(client: Client, world: World) -> None:
    for name in NAMES:
        for digest, folder in world.digests.items():
            client.adapters.push(folder, name)
            client.adapters.unpin(f"{name}@{digest}")
    wait_until(lambda: not any(copy.pinned for copy in client.adapters.residency()), "all pins end")
