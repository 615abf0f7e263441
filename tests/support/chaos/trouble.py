"""What happens to a fleet under traffic: operators who change adapters, and services that die."""

import random
import signal
import time

from lorafleet import Client, LoraFleetError
from tests.support.chaos.run import NAMES, NEVER, World
from tests.support.services.cluster import Node


class Operator:
    """Moves aliases, pushes, deletes, drains, pins, drops and collects."""

    def __init__(self, world: World, seed: int) -> None:
        self._world, self._draw = world, random.Random(seed)

    def run(self) -> None:
        clients = [Client(address, timeout=8) for address in self._world.addresses]
        try:
            while self._world.goes_on:
                acts = (self._move, self._push, self._delete, self._drain, self._keep, self._collect)
                [act] = self._draw.choices(acts, (6, 6, 1, 1, 4, 1))
                try:
                    act(self._draw.choice(clients))
                except LoraFleetError as error:
                    if isinstance(error, NEVER):
                        self._world.problems.append(f"operator: {type(error).__name__}: {error}")
                    self._world.outcomes[f"operator: {error.reason or error.code.name}"] += 1
                time.sleep(self._draw.uniform(0, 0.3))
        finally:
            for client in clients:
                client.close()

    def _any(self) -> tuple[str, str]:
        return self._draw.choice(NAMES), self._draw.choice([*self._world.digests])

    def _move(self, client: Client) -> None:
        name, digest = self._any()
        self._world.aliases.changing(name, digest)
        client.adapters.set_alias(f"{name}@latest", digest)
        self._world.aliases.changed(name, digest)

    def _push(self, client: Client) -> None:
        name, digest = self._any()
        self._world.aliases.changing(name, digest)
        client.adapters.push(self._world.digests[digest], name)
        self._world.aliases.changed(name, digest)

    def _delete(self, client: Client) -> None:
        name, digest = self._any()
        client.adapters.delete(f"{name}@{digest}", force=True, now=self._draw.random() < 0.5)

    def _drain(self, client: Client) -> None:
        name, digest = self._any()
        client.adapters.drain(f"{name}@{digest}")

    def _keep(self, client: Client) -> None:
        name, digest = self._any()
        ref = f"{name}@{digest}"
        match self._draw.choice(("pin", "pin", "unpin", "drop")):
            case "pin":
                client.adapters.pin(ref, tier=self._draw.choice(("host", "slot")))
            case "unpin":
                client.adapters.unpin(ref)
            case "drop":
                client.adapters.drop(ref)

    def _collect(self, client: Client) -> None:
        client.adapters.collect()


class Breaker:
    """Kills, freezes and drains services, and starts them again."""

    def __init__(self, world: World, nodes: list[Node], seed: int) -> None:
        self._world, self._nodes, self._draw = world, nodes, random.Random(seed)

    def run(self) -> None:
        while self._world.goes_on:
            time.sleep(self._draw.uniform(0.2, 3))
            node = self._draw.choice(self._nodes)
            way = self._draw.choice((self._kill, self._kill, self._freeze, self._drain))
            self._world.outcomes[f"{way.__name__} {node.module}"] += 1
            way(node)

    def _kill(self, node: Node) -> None:
        node.kill()
        self._start(node)

    def _freeze(self, node: Node) -> None:
        node.signal(signal.SIGSTOP)
        time.sleep(self._draw.choice((0.1, 0.5, 4)))
        node.signal(signal.SIGCONT)

    def _drain(self, node: Node) -> None:
        node.terminate()
        if self._draw.random() < 0.3:
            time.sleep(self._draw.random())
            node.terminate()
        node.wait()
        self._start(node)

    def _start(self, node: Node) -> None:
        time.sleep(self._draw.choice((0, 0, 1)))
        node.start().wait_ready()
