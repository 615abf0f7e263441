"""Constraints that ask for more than anybody may take, and a caller of them that never rests.

`python -m tests.support.constrained.hostile ADDRESS TOKEN WAY` is a process of its own, niced on one core.
"""

import asyncio
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress

from lorafleet import AsyncClient, Constraint, LoraFleetError, Options

CALLERS = 8
TOKENS = 32
BRANCHES = [
    {"properties": {f"p{name}": {"enum": [f"{branch}-{name}-{i}" for i in range(9)]} for name in range(40)}}
    for branch in range(50)
]
WIDE = {"properties": {f"p{i}": {"type": "string"} for i in range(7_000)}}
# All of them are refused. They are as long as constraints may be.
REFUSED: Mapping[str, Constraint] = {
    "deep": Constraint.json_schema('{"items":' * 20_000 + "{}" + "}" * 20_000),
    "wide": Constraint.json_schema(WIDE),
    "nested": Constraint.json_schema({"anyOf": BRANCHES}),
    "alternatives": Constraint.regex("|".join(f"word{i}" for i in range(25_000))),
    "repeated": Constraint.regex("((a{1000}){1000}){1000}"),
    "groups": Constraint.regex("(" * 120_000 + ")" * 120_000),
}
# These are within all bounds of admission, and are as much as that lets through.
TAKEN: Mapping[str, Constraint] = {
    "states": Constraint.regex("(.*a.{300}){20}"),
    "counted": Constraint.regex("(?:[a-z]+ ){0,500}(?:[a-z ]+x){5}"),
    "forced": Constraint.regex("(ab){8000}"),
    "ambiguous": Constraint.lark('start: a\na: b a c | b | c | ""\nb: a a | "x"\nc: a b | "x" | "y"'),
    "many": Constraint.json_schema({"enum": [f"value {i}" for i in range(8000)]}),
    "long": Constraint.regex("[a-z]" * 50_000),
    "grammar": Constraint.lark("start: " + " | ".join(f'"a{i}" start "b{i}"' for i in range(9_000))),
    "branches": Constraint.json_schema({"anyOf": BRANCHES[:8]}),
}
PLAIN = "plain"  # As many requests, with no constraint.
WAYS = (PLAIN, "refused", "taken")


def constraints(way: str) -> Iterator[Constraint | None]:
    """Those of the refused ones are all different: what is known costs nothing."""
    for number in itertools.count():
        if way == PLAIN:
            yield None
        elif way == "taken":
            yield list(TAKEN.values())[number % len(TAKEN)]
        else:
            yield _another(list(REFUSED.values())[number % len(REFUSED)], number)


def _another(constraint: Constraint, number: int) -> Constraint:
    match constraint.kind:
        case "json_schema" if constraint.text.startswith('{"items"'):
            return Constraint.json_schema(constraint.text + " " * number)
        case "json_schema":
            return Constraint.json_schema({**json.loads(constraint.text), "title": str(number)})
        case "lark":
            return Constraint.lark(f"{constraint.text}\n// {number}")
        case _:
            return Constraint.regex(f"{constraint.text}{number}")


async def call(address: str, token: str, way: str) -> None:
    source = constraints(way)

    async def caller(client: AsyncClient) -> None:
        while True:
            with suppress(LoraFleetError):
                options = Options(max_new_tokens=TOKENS, temperature=1.0, timeout=60.0)
                await client.generate("x", constraint=next(source), **options)

    async with AsyncClient(address, token=token) as client:
        await asyncio.gather(*(caller(client) for _ in range(CALLERS)))


if __name__ == "__main__":
    os.nice(10)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    asyncio.run(call(*sys.argv[1:]))
