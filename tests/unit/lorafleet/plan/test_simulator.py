"""The lines between a plan and its simulator, where the other end answers, refuses or ends."""

import sys

import pytest

from lorafleet.bench.errors import BenchError
from lorafleet.plan.load import Arrival, Load
from lorafleet.plan.search import Fleet, Outcome
from lorafleet.plan.simulator import Measured, Question, Simulator, known_costs

HELLO = 'say({"measured": [{"card": "H200", "model": "m", "costs": "m-h200"}]})\n'
QUESTION = Question("m-h200", Load([Arrival(0.0, 5, 3, "a")], {"a": 8}), 100, 0, 4, 64, 1.0, 0)
FLEET = Fleet(2, 8, 1000)


def other_end(lines: str) -> list[str]:
    """A process that says these lines; `hear` waits for one of ours."""
    start = "import json, sys\ndef say(line): print(json.dumps(line), flush=True)\n"
    start += "def hear(): return json.loads(sys.stdin.readline())\n"
    return [sys.executable, "-c", start + lines]


def test_a_load_and_then_fleets() -> None:
    answer = (
        HELLO
        + "load = hear()['load']\nfleet = hear()\n"
        + "say({'outcome': dict(ttft_p50_s=0.1, ttft_p99_s=0.2, stream_tokens_s=fleet['executors'],"
        + " tokens_s=load['longest'], page_ins_per_request=fleet['kv_tokens'], failed=0.0)})\n"
        + "sys.stdin.read()\n"
    )
    with Simulator(other_end(answer)) as simulator:
        assert simulator.measured == (Measured("H200", "m", "m-h200"),)
        simulator.ask(QUESTION)
        assert simulator.run(FLEET, 77) == Outcome(0.1, 0.2, 2, 8, 77)


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (
            "sys.exit('No module named grpc')",
            "the simulator ended: No module named grpc; it needs pip install",
        ),
        (HELLO + "hear()\nsay({'error': 'no such costs'})\nsys.stdin.read()", "no such costs"),
        (HELLO + "hear()\nsys.exit()", "the simulator ended: it said nothing"),
        (HELLO + "sys.stdin.close(); sys.exit('gone')", "the simulator ended: gone"),
    ],
)
def test_what_the_other_end_cannot_do_is_one_error(lines: str, text: str) -> None:
    with pytest.raises(BenchError, match=text), Simulator(other_end(lines)) as simulator:
        simulator.ask(QUESTION)
        simulator.run(FLEET, 77)


def test_the_process_ends_with_the_block() -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        Simulator(other_end(HELLO + "while True: pass")) as simulator,
    ):
        raise KeyboardInterrupt
    assert simulator._process.poll() is not None


def test_what_was_not_measured_is_refused_with_what_was() -> None:
    measured = (Measured("H200", "llama", "llama-h200"), Measured("H100", "qwen", "qwen-h100"))
    assert known_costs(measured, "h200", ["./mine", "llama"]) == "llama-h200"
    assert known_costs(measured, "NVIDIA H100", ["qwen"]) == "qwen-h100"
    for card, models in (("A100", ["llama"]), ("H100", ["./mine", "llama"])):
        with pytest.raises(BenchError, match=rf"{card}.*{models[0]}.*known are: llama on H200, qwen on H100"):
            known_costs(measured, card, models)
