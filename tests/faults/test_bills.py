"""Schedulers and an executor are killed, a disk fills, the Redis goes: each answer has its one record.

`make bills` does all of it by chance, for a quarter of an hour.
"""

from pathlib import Path

from tests.support.chaos.bills import UNWRITTEN, Fleet, running
from tests.support.services.cluster import wait_until


def test_every_answer_whose_end_a_client_saw_has_one_record(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path, 2, 1, {}, "executor.bench.paced") as fleet:
        first, second = fleet.schedulers
        with fleet.under_traffic(callers=6, seed=1):
            _more_answers(fleet)
            fleet.kill(first)
            fleet.fill(1, seconds=0)
            _more_answers(fleet)
            fleet.take_redis_away(0.5)
            fleet.kill(fleet.executors[0])
            _more_answers(fleet)
        seen = fleet.seen()
        assert not seen.problems, seen.problems[0]
        assert seen.recorded == seen.ends > 0 and seen.in_redis == seen.answers, seen
        assert seen.lost == 0 and all(not node.gauge(UNWRITTEN) for node in (first, second))


def _more_answers(fleet: Fleet) -> None:
    enough = len(fleet.world.ends) + 20
    wait_until(lambda: len(fleet.world.ends) >= enough or fleet.world.problems, "answers")
