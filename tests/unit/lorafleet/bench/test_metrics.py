"""How busy processes were, from what they expose."""

from lorafleet.bench.metrics import cpu_shares, read_cpu_seconds

SCHEDULER = "lorafleet_scheduler_executors 1.0\nprocess_cpu_seconds_total 3.5\n"
EXECUTOR = "process_cpu_seconds_total 10.25\nlorafleet_executor_slots 8.0\n"


def test_seconds_are_summed_by_service_and_left_out_where_nothing_tells_them() -> None:
    assert read_cpu_seconds([EXECUTOR, SCHEDULER, EXECUTOR]) == {"executor": 20.5, "scheduler": 3.5}
    assert read_cpu_seconds(["lorafleet_executor_slots 8.0\n"]) == {}


def test_shares_are_cores_between_two_readings() -> None:
    before, after = {"client": 1.0, "executor": 20.0}, {"client": 2.0, "executor": 24.0}
    assert cpu_shares(before, after, seconds=2.0) == {"client": 0.5, "executor": 2.0}
    assert cpu_shares(before, after, seconds=0.0) == {}, "a play that nothing came of"
