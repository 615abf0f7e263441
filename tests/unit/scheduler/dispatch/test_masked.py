"""Requests with constraints go to executors that know of them, and with every attempt."""

from dataclasses import replace

import pytest

from lorafleet.v1 import common_pb2, executor_pb2
from scheduler.admission.masks import Masks
from scheduler.dispatch.dispatcher import Dispatcher
from scheduler.errors import NoConstraints
from scheduler.text.tokenizer import Tokenizer
from tests.support.services.fakes import FakeExecutor
from tests.support.services.scheduling import (
    admitted,
    dispatcher_of,
    executors,
    expected_tokens,
    read_all,
    ready,
    running,
    tokens_in,
    until,
)

MASKS = Masks(common_pb2.Constraint(regex="[a-z]+"), (5, 6), ((7,), (8, 9)))


async def test_only_who_knows_of_constraints_gets_one(tokenizer: Tokenizer) -> None:
    """However busy it is beside one that would answer without it."""
    async with executors(2, seats=2) as (old, new):
        old.hello.knows_constraints = False
        async with running(dispatcher_of([old.address, new.address], tokenizer)) as dispatcher:
            await ready(dispatcher, 2)
            masked = [replace(admitted(f"m{number}"), masks=MASKS) for number in range(6)]
            plain = [admitted(f"p{number}") for number in range(6)]
            for request, live in [(each, dispatcher.submit(each, None)) for each in (*masked, *plain)]:
                assert tokens_in(await read_all(live)) == expected_tokens(request)
    assert not any(each.HasField("constraint") for each in old.dispatches)
    assert {each.request_id for each in new.dispatches} >= {each.request_id for each in masked}
    assert old.dispatches


@pytest.mark.parametrize(
    "masks", [Masks(MASKS.constraint), Masks(allowed_token_ids=(5,)), Masks(bad_words=((7,),))]
)
async def test_where_nobody_knows_of_them_the_request_is_refused(tokenizer: Tokenizer, masks: Masks) -> None:
    async with executors(1) as (old,):
        old.hello.knows_constraints = False
        async with running(dispatcher_of([old.address], tokenizer)) as dispatcher:
            await ready(dispatcher)
            with pytest.raises(NoConstraints):
                await read_all(dispatcher.submit(replace(admitted(), masks=masks), None))
    assert not old.dispatches


async def test_an_answer_goes_on_elsewhere_with_its_constraint(tokenizer: Tokenizer) -> None:
    """Not at an executor that does not know of it: who comes later does."""
    async with executors(3) as (first, old, later):
        old.hello.knows_constraints = False
        first.break_after = 3
        later.load_state = executor_pb2.LOAD_STATE_DRAINING
        addresses = [first.address, old.address, later.address]
        async with running(dispatcher_of(addresses, tokenizer)) as dispatcher:
            await ready(dispatcher, 2)
            request = replace(admitted(), masks=MASKS)
            live = dispatcher.submit(request, None)
            await until(lambda: first.break_after is None)
            first.load_state, later.load_state = (
                executor_pb2.LOAD_STATE_DRAINING,
                executor_pb2.LOAD_STATE_READY,
            )
            assert tokens_in(await read_all(live)) == expected_tokens(request)
    sent = [*first.dispatches, *later.dispatches]
    assert len(sent) >= 2 and not old.dispatches
    assert any(each.output_token_ids for each in sent)
    for each in sent:
        assert each.constraint == MASKS.constraint
        assert list(each.allowed_token_ids) == [5, 6]
        assert [list(word.token_ids) for word in each.bad_words] == [[7], [8, 9]]


async def test_whose_log_probabilities_are_asked_for_goes_with_it(
    dispatcher: Dispatcher, fake: FakeExecutor
) -> None:
    request = admitted()
    request.response.masked_logprobs = True
    await read_all(dispatcher.submit(request, None))
    assert [each.masked_logprobs for each in fake.dispatches] == [True]
