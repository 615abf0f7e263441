"""What constraints cost an engine: tokens a second, gaps of streams beside them, first tokens.

Llama-3.1-8B's shapes with random weights on a GPU, and a model of one small layer on the CPU. Both have a
made-up tokenizer of Llama's 128,256 tokens.
"""

import json
import random
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from adapter_store import DiskStore
from executor.batch.sampling import SamplingParams
from executor.batch.sequence import Dispatch, Key, Sequence, StopRules
from executor.bench.made_tokenizer import write_tokenizer
from executor.bench.traffic import SHAPES
from executor.build import build_engine
from executor.config import ExecutorConfig
from executor.engine import Engine
from executor.engine_thread import EngineThread
from executor.events import EngineInfo, StepEvents
from executor.guides.guide import Vocabulary
from executor.guides.guides import Guides
from executor.guides.workshop import Workshop
from executor.metrics import Metrics
from executor.step.token_masks import MaskBuffers
from lorafleet.constraints.constraint import Constraint
from lorafleet.constraints.tokens import guide_tokenizer

ROWS, PROMPT, OUTPUT = 64, 128, 128
ON_GPU = torch.cuda.is_available()
ROUNDS, FIRSTS = (12, 20) if ON_GPU else (1, 2)
SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 1,
}  # fmt: skip
END_S = 600.0
PERSON = {
    "name": "Ada Lovelace of London", "age": 36, "kind": "customer", "tags": ["engines", "computing"],
    "address": {"street": "12 Saint James Square", "zip": "12345", "geo": {"lat": 51.5074, "lon": -0.1278}},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Round:
    """D1's load, `rows` greedy answers of 128 tokens behind prompts of 128 at once, `guided` of them by a
    nested schema that is known: medians of rounds in turn. `share` is of the tokens a second without guides.
    `gap_ms` is between two tokens of those that are not guided, `gap_share` of it without guides."""

    part: str
    rows: int
    guided: int
    tokens_per_s: float
    share: float
    gap_ms: float | None
    gap_share: float | None


@dataclass(frozen=True, slots=True)
class First:
    """Milliseconds until the first token of a prompt of 128, by itself or beside 63 streams: the median and
    the longest, without a schema, with one that was never asked for, and with one that was."""

    part: str
    beside: int
    schema: str
    median_ms: float
    longest_ms: float


@dataclass(frozen=True, slots=True)
class Fill:
    """Microseconds of the engine's thread to fill and send the masks of a step of `rows` guided answers, all
    at the same place of one text, and for them to take its next token: medians, and the longest."""

    part: str
    rows: int
    mask_us: float
    longest_mask_us: float
    advance_us: float


def run() -> Iterator[dict[str, object]]:
    with TemporaryDirectory() as folder, _running(Path(folder)) as bench:
        for rows in (1, ROWS):
            yield asdict(_fill(Path(folder), rows))
        yield from (asdict(row) for row in _rounds(bench))
        for beside in (0, ROWS - 1):
            yield from (asdict(row) for row in _firsts(bench, beside))


def schema(name: str, least: int = 200) -> Constraint:
    """Nested, and no answer of the bench's length comes to its end. `name` makes it another one."""
    place = _object(street={"type": "string"}, zip={"type": "string", "pattern": "^[0-9]{5}$"}, geo=_object(
        lat={"type": "number"}, lon={"type": "number"}
    ))  # fmt: skip
    person = _object(
        **{name: {"type": "string", "maxLength": 40}},
        age={"type": "integer", "minimum": 0, "maximum": 150},
        kind={"enum": ["customer", "supplier", "partner"]},
        tags={"type": "array", "items": {"type": "string"}, "maxItems": 5},
        address=place,
    )
    return Constraint.json_schema({"type": "array", "items": person, "minItems": least})


def _object(**properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(properties),
        "additionalProperties": False,
    }  # fmt: skip


class _Bench:
    """An engine on its thread, asked from here. Times are those of its events."""

    def __init__(self) -> None:
        self.times: dict[Key, list[float]] = {}
        self.thread: EngineThread | None = None
        self._ready = threading.Event()
        self._news = threading.Condition()
        self._ended: set[Key] = set()
        self._failure: BaseException | None = None
        self._asked = 0
        self._draw = random.Random(1)

    def dispatch(self, constraint: Constraint | None, output: int = OUTPUT) -> Dispatch:
        self._asked += 1
        return Dispatch(
            key=(0, f"{self._asked}"),
            request_id="",
            digest="",
            prompt_token_ids=tuple(self._draw.randrange(1000, 100_000) for _ in range(PROMPT)),
            output_token_ids=(),
            sampling=SamplingParams(temperature=0),
            stop=StopRules(max_new_tokens=output, ignore_eos=constraint is None),
            constraint=constraint,
        )

    def ask(self, dispatches: list[Dispatch]) -> float:
        """When."""
        assert self.thread is not None

        def command(engine: Engine) -> None:
            for dispatch in dispatches:
                engine.add(dispatch)

        now = time.monotonic()
        self.thread.submit(command)
        return now

    def wait(self, dispatches: list[Dispatch]) -> None:
        """Until all have ended."""
        keys = {dispatch.key for dispatch in dispatches}
        with self._news:
            if not self._news.wait_for(lambda: self._failure or keys <= self._ended, END_S):
                raise RuntimeError("the engine does not get there")
        if self._failure:
            raise RuntimeError("the engine has failed") from self._failure

    def wait_for_first(self, dispatches: list[Dispatch]) -> None:
        with self._news:
            self._news.wait_for(
                lambda: self._failure or all(each.key in self.times for each in dispatches), END_S
            )

    def wait_ready(self) -> None:
        self._ready.wait()
        self.wait([])

    def on_ready(self, info: EngineInfo) -> None:
        if not info.knows_constraints:
            self._failure = RuntimeError("the engine knows no constraints")
        self._ready.set()

    def on_events(self, events: StepEvents) -> None:
        now = time.monotonic()
        with self._news:
            for token in events.tokens:
                self.times.setdefault(token.key, []).append(now)
            self._ended.update(end.key for end in events.finished)
            for refused in events.rejected:
                self._failure = RuntimeError(refused.rejection.message)
            self._news.notify_all()

    def on_end(self, error: Exception | None) -> None:
        with self._news:
            self._failure = error or self._failure
            self._news.notify_all()
        self._ready.set()


@contextmanager
def _running(folder: Path) -> Iterator[_Bench]:
    end = write_tokenizer(folder, SHAPES["vocab_size"])  # type: ignore[arg-type]
    shape = {**SHAPES, "num_hidden_layers": 32, **({} if ON_GPU else SMALL), "eos_token_id": end}
    (folder / "config.json").write_text(json.dumps(shape))
    bench, store = _Bench(), DiskStore(folder / "store")
    config = ExecutorConfig(
        model=str(folder),
        store=str(folder / "store"),
        device="cuda" if ON_GPU else "cpu",
        load_format="dummy",
        async_scheduling="true",
        max_loras=1,
        max_seats=ROWS,
        num_kv_blocks=ROWS * 2048 // 16,
        max_model_len=2048,
        host_memory_bytes=1 << 30,
        loader_processes=0,
    )
    metrics = Metrics(CollectorRegistry())
    bench.thread = EngineThread(
        lambda wake: build_engine(config, store, metrics=metrics, wake=wake),
        bench.on_ready,
        bench.on_events,
        bench.on_end,
    )
    bench.thread.start()
    bench.wait_ready()
    yield bench
    bench.thread.stop()
    bench.thread.join(END_S)


def _fill(folder: Path, rows: int) -> Fill:
    vocab_size, device = int(str(SHAPES["vocab_size"])), "cuda" if ON_GPU else "cpu"
    vocabulary, wake = Vocabulary(vocab_size, frozenset({vocab_size - 1})), threading.Event()
    tokenizer = guide_tokenizer(folder, vocab_size, vocabulary.end_token_ids)
    guides = Guides(Workshop(tokenizer, vocabulary, wake.set), MaskBuffers(rows, vocab_size, device))
    rules, sampling = StopRules(), SamplingParams()
    sequences = [
        Sequence(
            Dispatch((0, f"{row}"), "", "", (1,), (), sampling, rules, constraint=schema("name")), row, 0.0
        )
        for row in range(rows)
    ]
    for sequence in sequences:
        guides.begin(sequence)
    while not all(sequence.ready for sequence in sequences):
        wake.wait()
        guides.collect()
    masks, advances = [], []
    for token in tokenizer.tokenize_str(json.dumps([PERSON] * 2)[:-1]):
        started = time.perf_counter()
        guides.masks(sequences)
        filled = time.perf_counter()
        for sequence in sequences:
            guides.advance(sequence, token)
        masks.append(1e6 * (filled - started))
        advances.append(1e6 * (time.perf_counter() - filled))
    if any(guide.failure for sequence in sequences if (guide := guides.of(sequence))):
        raise RuntimeError("the text does not fit the schema")
    guides.close()
    return Fill("guided, masks of a step", rows, median(masks), max(masks), median(advances))


def _rounds(bench: _Bench) -> Iterator[Round]:
    known = schema("name")
    rates: dict[int, list[float]] = {0: [], 1: [], ROWS: []}
    gaps: dict[int, list[float]] = {0: [], 1: [], ROWS: []}
    for turn in range(ROUNDS + 1):
        for guided in rates:
            asked = [bench.dispatch(known if row < guided else None) for row in range(ROWS)]
            started = bench.ask(asked)
            bench.wait(asked)
            if turn:  # the first one warms up
                last = max(bench.times[each.key][-1] for each in asked)
                rates[guided].append(ROWS * OUTPUT / (last - started))
                gaps[guided] += _gaps(bench, asked[guided:])
    rate, gap = median(rates[0]), median(gaps[0])
    for guided, found in rates.items():
        of = median(gaps[guided]) if gaps[guided] else None
        share = of / gap if of else None
        yield Round(
            "guided", ROWS, guided, median(found), median(found) / rate, 1e3 * of if of else None, share
        )


def _gaps(bench: _Bench, asked: list[Dispatch]) -> list[float]:
    return [after - before for each in asked for before, after in pairwise(bench.times[each.key])]


def _firsts(bench: _Bench, beside: int) -> Iterator[First]:
    """In turn, and what runs beside them runs all the time."""
    found: dict[str, list[float]] = {"none": [], "new": [], "known": []}
    streams = [bench.dispatch(None, 64 * FIRSTS) for _ in range(beside)]
    bench.ask(streams)
    bench.wait_for_first(streams)
    for turn in range(FIRSTS):
        constraints = {"none": None, "new": schema(f"name {beside} {turn}"), "known": schema("name")}
        for kind, constraint in constraints.items():
            asked = bench.dispatch(constraint, 2)
            started = bench.ask([asked])
            bench.wait([asked])
            found[kind].append(1e3 * (bench.times[asked.key][0] - started))
    bench.wait(streams)
    for kind, times in found.items():
        yield First("guided, first token", beside, kind, median(times), max(times))
