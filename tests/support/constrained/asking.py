"""Asks real services for answers that fit schemas, and judges each by jsonschema and by llguidance."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jsonschema
from jsonschema.validators import validator_for
from llguidance import LLTokenizer

from lorafleet import AsyncClient, Constraint, FinishReason, Generation, InvalidRequest, LoraFleetError
from lorafleet.constraints.grammar import matcher_of
from tests.support.constrained.schemas import Schema

AT_ONCE = 16
QUESTIONS = ("Describe a cat.", "What is the capital of France?", "Who wrote Faust, and when?")
ANSWER_S = 240.0


@dataclass
class Tally:
    """What became of the schemas of one source.

    refused   at admission, by the keyword or what else was named
    valid     finished, and jsonschema finds that they fit
    cut       by max_new_tokens; `prefixes` of them are the beginnings of texts that fit
    wrong     finished, and not valid; or cut, and no beginning: there may be none
    failed    by reason
    unjudged  finished, but jsonschema cannot read the schema: a pattern that Python's `re` does not know
    """

    asked: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    valid: int = 0
    cut: int = 0
    prefixes: int = 0
    wrong: list[dict[str, Any]] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    unjudged: int = 0
    finished_by: Counter[str] = field(default_factory=Counter)

    def report(self) -> dict[str, Any]:
        refused = dict(self.refused.most_common())
        share = round(sum(refused.values()) / max(1, self.asked), 3)
        return {
            "asked": self.asked,
            "refused": {"share": share, **refused},
            "finished_and_valid": self.valid,
            "finished_by_adapter": dict(sorted(self.finished_by.items())),
            "cut": self.cut,
            "cut_and_beginnings": self.prefixes,
            "failed": dict(self.failed),
            "unjudged": self.unjudged,
            "wrong": self.wrong,
        }


class Asker:
    """Asks in turn the base and each adapter, greedily and not."""

    def __init__(
        self, client: AsyncClient, guide: LLTokenizer, names: Sequence[str | None], tokens: int
    ) -> None:
        """`names` are adapters, None the base; answers have so many `tokens` at most."""
        self._client, self._guide, self._names, self._tokens = client, guide, names, tokens

    async def ask(self, schemas: Iterable[Schema]) -> Tally:
        tally, room = Tally(), asyncio.Semaphore(AT_ONCE)

        async def one(number: int, schema: Schema) -> None:
            async with room:
                await self._one(tally, number, schema)

        async with asyncio.TaskGroup() as asking:
            for number, schema in enumerate(schemas):
                asking.create_task(one(number, schema))
        return tally

    async def _one(self, tally: Tally, number: int, schema: Schema) -> None:
        tally.asked += 1
        name = self._names[number % len(self._names)]
        chat = [{"role": "user", "content": f"{QUESTIONS[number % len(QUESTIONS)]} Answer in JSON."}]
        try:
            answer = await self._client.generate(
                chat,
                adapter=name,
                constraint=Constraint.json_schema(schema),
                max_new_tokens=self._tokens,
                temperature=float(number // len(self._names) % 2),
                seed=number,
            )
        except InvalidRequest as error:
            tally.refused[named(error.violations[0].description)] += 1
        except LoraFleetError as error:
            tally.failed[error.reason or error.code.name] += 1
        else:
            self._judge(tally, name or "base", schema, answer)

    def _judge(self, tally: Tally, name: str, schema: Schema, answer: Generation) -> None:
        if answer.finish_reason is FinishReason.STOP:
            try:
                right = fits(schema, answer.text)
            except re.error:
                tally.unjudged += 1
                return
            tally.valid += right
            tally.finished_by[name] += 1
        else:
            tally.cut += 1
            right = self._begins(schema, answer.token_ids)
            tally.prefixes += right
        if not right:
            tally.wrong.append({"schema": schema, "adapter": name, "text": answer.text})

    def _begins(self, schema: Schema, token_ids: Sequence[int]) -> bool:
        matcher = matcher_of(self._guide, Constraint.json_schema(schema))
        return matcher.try_consume_tokens(list(token_ids)) == len(token_ids)


def fits(schema: Schema, text: str) -> bool:
    """Raises re.error for a pattern that Python does not know."""
    validator = validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    try:
        return bool(validator.is_valid(json.loads(text)))
    except ValueError:
        return False


def named(description: str) -> str:
    """The keyword that a refusal names, or the kind of it."""
    if match := re.match(r"answers cannot be held to (.+?)(?: where|$)", description):
        return match[1]
    if match := re.match(r"Unknown format: (\S+)", description):
        return f"format {match[1]}"
    if description.startswith("Unsatisfiable"):
        return "fits no text"
    if "regular expression" in description:
        return "pattern"
    return re.sub(r"['\"/\d].*", "", description).strip()[:60]
