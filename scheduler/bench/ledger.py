"""What a usage record costs an answer: `python -m scheduler.bench.ledger --json FILE`."""

import argparse
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from prometheus_client import CollectorRegistry

from lorafleet.bench.results import head, say, write
from lorafleet.v1 import common_pb2, inference_pb2
from scheduler.dispatch.live_request import LiveRequest
from scheduler.ledger.answer_id import AnswerIds
from scheduler.ledger.files import LedgerFile
from scheduler.ledger.ledger import Ledger
from scheduler.ledger_entry import LedgerEntry
from scheduler.metrics import Metrics

ANSWERS = 50_000


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scheduler.bench.ledger", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where results go")
    args = parser.parse_args()
    rows = {}
    for name, written in (("counted", False), ("counted and written", True)):
        with tempfile.TemporaryDirectory() as folder:
            file = LedgerFile(Path(folder)) if written else None
            rows[name] = round(min(_microseconds(file) for _ in range(5)), 2)
            if file:
                file.close()
                line = next(Path(folder).iterdir()).read_bytes().partition(b"\n")[0]
                rows["bytes"] = len(line) + 1
    write(args.json, head("python -m scheduler.bench.ledger") | {"cpu_us_an_answer": rows})
    say(rows)


def _microseconds(file: LedgerFile | None) -> float:
    """Time of this process's and the kernel's time for it, from the acceptance of an answer to its end."""
    ledger, live = Ledger(Metrics(CollectorRegistry()).ledger, file), _live()
    ids, request = AnswerIds(bytes(32)), inference_pb2.GenerateRequest(request_id="a" * 32, text="a" * 500)
    began = time.process_time()
    for _ in range(ANSWERS):
        ledger.check(again=False)
        entry = LedgerEntry(ledger, ids.draw("acme", request), live)
        _told = str(entry.answer_id), str(entry.answer_id)  # In headers and in the first chunk.
        entry.finish(common_pb2.FINISH_REASON_LENGTH)
        entry.end("CANCELLED")  # As all that ended do, for which nothing is left to record.
    return (time.process_time() - began) / ANSWERS * 1e6


def _live() -> LiveRequest:
    """What a record is made of, and nothing else of a request."""
    admitted = SimpleNamespace(
        identity=SimpleNamespace(tenant="acme"),
        adapter="acme/support",
        digest="sha256:" + "a" * 64,
        prompt_token_ids=(7,) * 120,
        resumed_token_ids=(),
    )
    live = SimpleNamespace(admitted=admitted, cached_prompt_tokens=96, completion_tokens=48)
    return cast(LiveRequest, live)


if __name__ == "__main__":
    main()
