"""The program of workers that check constraints: it has the model's tokens, jobs have bounds.

A regular expression of 20 characters may take minutes and gigabytes: what takes more than the bounds ends the
process, and is refused for that.
"""

import resource
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from adapter_store.errors import InvalidModel
from lorafleet.constraints.check import check
from lorafleet.constraints.constraint import Constraint
from lorafleet.constraints.grammar import InvalidConstraint
from lorafleet.constraints.tokens import InvalidTokenizer, guide_tokenizer
from lorafleet.v1 import common_pb2
from scheduler.workers.program import serve, write

MEMORY_BYTES = 64 << 20  # Of one job.
# Less than executors' threads have: what is too deep for them is too deep here.
STACK_BYTES = 4 << 20
MAX_ERROR_CHARS = 300


def main(folder: str, vocab_size: str, end_token_ids: str, cpu_limit_s: str) -> None:
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    try:
        ends = [int(token_id) for token_id in end_token_ids.split(",") if token_id]
        guide = guide_tokenizer(Path(folder), int(vocab_size), ends)
    except (InvalidTokenizer, InvalidModel) as error:
        write(sys.stdout.buffer, str(error).encode())
        return
    check(guide, Constraint.json_object())  # What is loaded late is loaded now.
    serve(partial(_answer, guide), float(cpu_limit_s))


def _answer(guide: LLTokenizer, job: Mapping[str, Any]) -> Mapping[str, Any]:
    """`job` has the message as bytes in hex. Nothing in the answer: it is good."""
    constraint = Constraint.from_proto(common_pb2.Constraint.FromString(bytes.fromhex(job["constraint"])))
    if constraint is None:
        return {"error": "is of no kind that is known here", "place": ""}
    most = _memory_bytes() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    try:
        check(guide, constraint)
    except InvalidConstraint as error:
        return {"error": str(error)[:MAX_ERROR_CHARS], "place": error.place}
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return {}


def _memory_bytes() -> int:
    """Of addresses, which is what the limit is about."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main(*sys.argv[1:])
