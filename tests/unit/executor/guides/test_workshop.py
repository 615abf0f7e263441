"""Guides that are made on other threads."""

import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from executor.batch.sequence import Sequence
from executor.guides import workshop as module
from executor.guides.guide import Vocabulary
from executor.guides.workshop import MOST_GRAMMARS, Made, Workshop
from lorafleet.constraints.constraint import Constraint
from lorafleet.constraints.tokens import guide_tokenizer
from tests.support.engines.guided import CONSTRAINTS, EOS, VOCABULARY, guided, make_guided_base

PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_guided_base(tmp_path_factory.mktemp("guided"))


@pytest.fixture
def news() -> threading.Semaphore:
    return threading.Semaphore(0)


@pytest.fixture
def workshop(base: Path, news: threading.Semaphore) -> Iterator[Workshop]:
    tokenizer = guide_tokenizer(base, VOCABULARY, [EOS])
    made = Workshop(tokenizer, Vocabulary(VOCABULARY, frozenset({EOS})), news.release)
    yield made
    made.close()


def sequence(name: str, constraint: Constraint) -> Sequence:
    return Sequence(guided(name, constraint), 0, 0.0)


def wait_for(workshop: Workshop, news: threading.Semaphore, count: int) -> list[Made]:
    found: list[Made] = []
    while len(found) < count:
        assert news.acquire(timeout=PATIENCE_S)
        found += workshop.made()
    return found


def test_many_of_one_constraint_compile_it_once(workshop: Workshop, news: threading.Semaphore) -> None:
    schema = CONSTRAINTS["schema"]
    with mock.patch.object(module, "matcher_of", wraps=module.matcher_of) as compiled:
        for number in range(20):
            workshop.make(sequence(f"{number}", schema), schema)
        made = wait_for(workshop, news, 20)
        assert compiled.call_count == 1
    guides = [each.guide for each in made]
    assert len({id(each.matcher) for each in guides if each}) == 20
    first, second = guides[:2]
    assert first and second and first.matcher and second.matcher
    first.advance(next(token for token in range(VOCABULARY) if first.matcher.validate_tokens([token])))
    assert first.matcher.compute_bitmask() != second.matcher.compute_bitmask()


def test_those_asked_for_last_are_kept(workshop: Workshop, news: threading.Semaphore) -> None:
    constraints = [Constraint.regex(f"x{{{number}}}") for number in range(1, MOST_GRAMMARS + 2)]
    with mock.patch.object(module, "matcher_of", wraps=module.matcher_of) as compiled:
        for each in (*constraints[:-1], constraints[0], constraints[-1], constraints[0], constraints[1]):
            workshop.make(sequence("", each), each)
            wait_for(workshop, news, 1)
    assert compiled.call_count == MOST_GRAMMARS + 2, "the second was given up for the last"


def test_a_failure_is_told_and_the_next_one_is_made(workshop: Workshop, news: threading.Semaphore) -> None:
    bad = Constraint.lark("start: nowhere")
    workshop.make(sequence("bad", bad), bad)
    workshop.make(sequence("good", CONSTRAINTS["choice"]), CONSTRAINTS["choice"])
    made = {each.sequence.dispatch.key[1]: each for each in wait_for(workshop, news, 2)}
    assert made["bad"].guide is None and "nowhere" in str(made["bad"].failure)
    assert made["good"].guide and made["good"].failure is None
