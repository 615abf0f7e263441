"""`lorafleet demo`: a small real model, all services, and answers from all its adapters at once."""

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from lorafleet.aio import AsyncClient
from lorafleet.client import Client
from lorafleet.constraints.constraint import Constraint
from lorafleet.demo.counts import SlotCounts, read_counts
from lorafleet.demo.live import View
from lorafleet.demo.model import MODEL_NAME, prepare_model
from lorafleet.errors import LoraFleetError
from lorafleet.local import LocalConfig, LocalFleet
from lorafleet.requests import Options

ADAPTERS = Path(__file__).parent / "adapters"
BASE = "base"
QUESTIONS = ("What is the capital of France?", "Why is the sky blue?")
MAX_NEW_TOKENS = 40
# What answers of the adapter "json" are held to: trained or not, they fit, and are short enough to be whole.
JSON_TOKENS = 96
JSON_NAMES = ("topic", "answer")
JSON_SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 60} for name in JSON_NAMES},
    "required": list(JSON_NAMES),
    "additionalProperties": False,
}
READY_SECONDS = 300.0
# The services are on this machine: what does not come back soon has died.
RESUME_SECONDS = 10.0
ANSWER_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    """ttft_s: from the question to its first token. tokens_per_s: after that."""

    adapter: str
    digest: str
    question: str
    text: str
    tokens: int
    finish_reason: str
    ttft_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One adapter's answers together; times are means. A slot hit found the adapter in a slot already."""

    adapter: str
    digest: str
    tokens: int
    ttft_s: float
    tokens_per_s: float
    slot_hits: int
    page_ins: int


@dataclass(frozen=True, slots=True)
class Report:
    """problems is empty when the demo showed what it should."""

    model: str
    max_loras: int
    rows: tuple[Row, ...]
    answers: tuple[Answer, ...]
    slot_hits: int
    page_ins: int
    problems: tuple[str, ...]


def run(cache: Path, max_loras: int, keep: bool, view: View) -> Report:
    """Raises LaunchError, LoraFleetError, or ModelUnavailable, each with one line that says what to do.

    keep: leave store and logs in their folder and tell its name.
    """
    model = prepare_model(cache, view.stage)
    with _folder(keep, view) as folder, (folder / "services.log").open("w", buffering=1) as log:
        config = LocalConfig(
            model=model,
            store=folder / "store",
            port=0,
            metrics_port=0,
            executor_args=("--max-loras", str(max_loras)),
        )
        with LocalFleet(config, lambda service, line: _write(log, f"[{service}] {line}")) as fleet:
            view.stage("start", 0.0)
            fleet.wait_ready(READY_SECONDS)
            view.stage("start", 1.0)
            digests = _push(fleet.target, view)
            answers = _ask(fleet, [BASE, *digests], view)
            return _report(max_loras, digests, answers, read_counts(fleet.executor_metrics))


def _write(log: TextIO, line: str) -> None:
    log.write(line + "\n")


@contextmanager
def _folder(keep: bool, view: View) -> Iterator[Path]:
    if keep:
        folder = Path(tempfile.mkdtemp(prefix="lorafleet-demo-"))
        try:
            yield folder
        finally:
            view.note(f"kept: {folder}")
    else:
        with tempfile.TemporaryDirectory(prefix="lorafleet-demo-") as name:
            yield Path(name)


def _push(target: str, view: View) -> dict[str, str]:
    """Push all adapters; returns their digests by name."""
    folders = sorted(path.parent for path in ADAPTERS.glob("*/adapter_config.json"))
    digests = {}
    with Client(target) as client:
        for index, folder in enumerate(folders):
            view.stage("push", index / len(folders))
            digests[folder.name] = client.adapters.push(folder, folder.name).version.digest
    view.stage("push", 1.0)
    return digests


def _ask(fleet: LocalFleet, names: Sequence[str], view: View) -> list[Answer]:
    try:
        with view:
            return asyncio.run(_ask_rounds(fleet.target, names, view))
    except LoraFleetError:
        fleet.wait(0)  # the better reason, if a service has ended
        raise


async def _ask_rounds(target: str, names: Sequence[str], view: View) -> list[Answer]:
    answers: list[Answer] = []
    async with AsyncClient(target, timeout=ANSWER_SECONDS, resume_timeout=RESUME_SECONDS) as client:
        for index, question in enumerate(QUESTIONS):
            view.ask(question, names)
            # Every second round goes backwards: adapters that are in their slots still come first.
            order = names if index % 2 == 0 else names[::-1]
            answers += await asyncio.gather(*(_answer(client, name, question, view) for name in order))
    return answers


async def _answer(client: AsyncClient, name: str, question: str, view: View) -> Answer:
    prompt = [{"role": "user", "content": question}]
    adapter = None if name == BASE else name
    constraint = Constraint.json_schema(JSON_SCHEMA) if name == "json" else None
    started = time.perf_counter()
    first = 0.0
    text, tokens, digest, finish_reason = "", 0, "", ""
    most = JSON_TOKENS if constraint else MAX_NEW_TOKENS
    options = Options(adapter=adapter, constraint=constraint, max_new_tokens=most)
    async with aclosing(client.stream(prompt, **options)) as chunks:
        async for chunk in chunks:
            if chunk.token_ids:
                first = first or time.perf_counter()
                tokens += len(chunk.token_ids)
            text += chunk.text
            digest, finish_reason = chunk.adapter_digest, str(chunk.finish_reason or "")
            view.show(name, text)
    seconds = time.perf_counter() - first
    rate = (tokens - 1) / seconds if tokens > 1 and seconds > 0 else 0.0
    view.answered(name, text)
    return Answer(name, digest, question, text, tokens, finish_reason, first - started, rate)


def _report(max_loras: int, digests: Mapping[str, str], answers: list[Answer], counts: SlotCounts) -> Report:
    rows = tuple(
        _row(name, digest, [answer for answer in answers if answer.adapter == name], counts)
        for name, digest in [(BASE, ""), *digests.items()]
    )
    problems = [f"{a.adapter} gave no answer to {a.question!r}" for a in answers if not a.text.strip()]
    problems += [
        f"{a.adapter} was answered by {a.digest or 'the base model'}"
        for a in answers
        if a.digest != digests.get(a.adapter, "")
    ]
    problems += [
        f"json answered {a.question!r} with what does not fit its schema: {a.text}"
        for a in answers
        if a.adapter == "json" and not _fits(a.text)
    ]
    if not counts.page_ins.total():
        problems.append("no adapter was paged in")
    return Report(
        model=MODEL_NAME,
        max_loras=max_loras,
        rows=rows,
        answers=tuple(answers),
        slot_hits=counts.slot_hits.total(),
        page_ins=counts.page_ins.total(),
        problems=tuple(problems),
    )


def _fits(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and tuple(value) == JSON_NAMES


def _row(name: str, digest: str, answers: list[Answer], counts: SlotCounts) -> Row:
    return Row(
        adapter=name,
        digest=digest,
        tokens=sum(answer.tokens for answer in answers),
        ttft_s=round(sum(answer.ttft_s for answer in answers) / len(answers), 3),
        tokens_per_s=round(sum(answer.tokens_per_s for answer in answers) / len(answers), 1),
        slot_hits=counts.slot_hits[digest],
        page_ins=counts.page_ins[digest],
    )
