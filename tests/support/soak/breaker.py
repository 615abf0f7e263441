"""Services of a soaked fleet go and come back by turns; the first scheduler and executor never do."""

import random
from collections.abc import Callable

from tests.support.services.cluster import Node
from tests.support.soak.causes import Cause
from tests.support.soak.fleet import Fleet

REDIS_AWAY_S = 2.0


class Breaker:
    """One turn is all of `_turn`, each `pause_s` after the last one; then it begins again."""

    def __init__(self, fleet: Fleet, seed: int, pause_s: float, ends_at: float) -> None:
        self._fleet, self._pause_s, self._ends_at = fleet, pause_s, ends_at
        self._draw = random.Random(seed)
        turn = [self._pause_redis, self._restart_redis]
        if len(fleet.executors) > 1:
            turn += [self._kill_executor, self._scale]
        if len(fleet.executors) > 2:
            turn.append(self._drain_executor)
        if len(fleet.schedulers) > 1:
            turn.append(self._restart_scheduler)
        self._turn: list[Callable[[], None]] = turn

    @property
    def period_s(self) -> float:
        """About how long a turn is."""
        return len(self._turn) * self._pause_s

    def run(self) -> None:
        while True:
            self._draw.shuffle(self._turn)
            for act in self._turn:
                if self._fleet.stops.wait(self._pause_s) or not self._fleet.tenants[0].goes_on:
                    return
                act()
                self._fleet.causes.did(f"breaker: {act.__name__.strip('_')}")

    def _pause_redis(self) -> None:
        with self._fleet.causes.lasting(Cause.STORE_AWAY):
            self._fleet.redis.pause()
            self._fleet.stops.wait(REDIS_AWAY_S)
            self._fleet.redis.go_on()

    def _restart_redis(self) -> None:
        with self._fleet.causes.lasting(Cause.STORE_AWAY):
            self._fleet.redis.restart()

    def _kill_executor(self) -> None:
        self._away(self._fleet.executors[1], Node.kill)

    def _drain_executor(self) -> None:
        self._away(self._fleet.executors[2], _end)

    def _restart_scheduler(self) -> None:
        with self._fleet.causes.lasting(Cause.SCHEDULER_AWAY):
            _end(self._fleet.schedulers[1])
            self._fleet.schedulers[1].start().wait_ready()

    def _scale(self) -> None:
        """The last executor leaves the fleet, and joins it again."""
        with self._fleet.causes.lasting(Cause.EXECUTOR_AWAY):
            self._fleet.tell(len(self._fleet.executors) - 1)
            self._fleet.stops.wait(self._pause_s / 2)
            self._fleet.tell(len(self._fleet.executors))

    def _away(self, node: Node, end: Callable[[Node], None]) -> None:
        with self._fleet.causes.lasting(Cause.EXECUTOR_AWAY):
            end(node)
            self._fleet.stops.wait(self._draw.uniform(0, 2))
            node.start().wait_ready()


def _end(node: Node) -> None:
    node.terminate()
    node.wait()
