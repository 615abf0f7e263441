"""Constraints are checked by real workers, within their bounds, and remembered."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from adapter_store import ModelSpec
from lorafleet.v1 import common_pb2
from scheduler.admission.constraints import Constraints
from scheduler.errors import InvalidRequest, NoConstraints
from scheduler.text.tokenizer import Tokenizer
from tests.support.adapters.peft import make_base
from tests.support.adapters.tokenizers import byte_level, write_folder
from tests.support.constrained.hostile import BRANCHES, REFUSED

Constraint, Choice = common_pb2.Constraint, common_pb2.Choice


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def checked(base: Path, spec: ModelSpec, tokenizer: Tokenizer) -> AsyncIterator[Constraints]:
    constraints = Constraints(base, spec.vocab_size, tokenizer.eos_token_ids, cpu_limit_s=0.3)
    yield constraints
    await constraints.close()


async def refusal(constraints: Constraints, constraint: common_pb2.Constraint, tenant: str = "acme") -> str:
    with pytest.raises(InvalidRequest) as caught:
        await constraints.check(constraint, tenant=tenant)
    return caught.value.message


@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_wrong_is_named_with_its_place(checked: Constraints) -> None:
    schema = json.dumps({"properties": {"age": {"not": {}}}})
    told = await refusal(checked, Constraint(json_schema=schema))
    assert told == "constraint.json_schema/properties/age: answers cannot be held to not"
    told = await refusal(checked, Constraint(regex="ab(?=c)"))
    assert told.startswith("constraint.regex: character 3 of the regular expression: look-around")
    await checked.check(Constraint(json_schema='{"type":"object"}'), tenant="acme")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", REFUSED)
async def test_hostile_ones_are_refused_and_the_next_one_is_checked(checked: Constraints, kind: str) -> None:
    assert REFUSED[kind].to_proto().ByteSize() <= 256 << 10
    told = await refusal(checked, REFUSED[kind].to_proto())
    assert told.startswith(f"constraint.{REFUSED[kind].to_proto().WhichOneof('kind')}")
    await checked.check(Constraint(regex=f"fine {kind}"), tenant="honest")


@pytest.mark.asyncio(loop_scope="module")
async def test_what_was_found_is_remembered(checked: Constraints, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = Constraint(regex="once"), Constraint(regex="once(")
    await checked.check(good, tenant="acme")
    told = await refusal(checked, bad)

    async def ask(*_: object, **__: object) -> None:
        raise AssertionError("it is known")

    monkeypatch.setattr(checked._workers, "ask", ask)
    await checked.check(good, tenant="rival")
    assert await refusal(checked, bad) == told


@pytest.mark.asyncio(loop_scope="module")
async def test_a_flood_of_one_tenant_holds_up_no_other(checked: Constraints) -> None:
    """While its constraints are checked one by one, others have their turns, and the loop runs."""

    async def bomb(number: int) -> None:
        schema = json.dumps({"anyOf": BRANCHES, "x": number})
        await checked.check(Constraint(json_schema=schema), tenant="bomber")

    bombs = [asyncio.create_task(bomb(number)) for number in range(20)]
    for number in range(10):
        await checked.check(Constraint(regex=f"mine {number}"), tenant="honest")
    ended = sum(each.done() for each in bombs)
    for each in bombs:
        each.cancel()
    await asyncio.gather(*bombs, return_exceptions=True)
    assert ended <= 4


async def test_small_ones_need_no_worker(base: Path, spec: ModelSpec) -> None:
    constraints = Constraints(base / "nowhere", spec.vocab_size, [0])
    await constraints.check(Constraint(json_object=True), tenant="acme")
    await constraints.check(Constraint(choice=Choice(choices=["yes", "no"])), tenant="acme")
    with pytest.raises(NoConstraints, match=r"tokenizer\.json"):
        await constraints.check(Constraint(choice=Choice(choices=["x" * 9000])), tenant="acme")
    await constraints.close()


async def test_a_model_whose_answers_have_no_end_takes_none(tmp_path: Path, spec: ModelSpec) -> None:
    folder = write_folder(make_base(tmp_path / "base", vocab_size=512), byte_level())
    constraints = Constraints(folder, spec.vocab_size, [])
    for constraint in Constraint(json_object=True), Constraint(regex="a"):
        with pytest.raises(NoConstraints, match="no end-of-sequence token"):
            await constraints.check(constraint, tenant="acme")
    await constraints.close()
