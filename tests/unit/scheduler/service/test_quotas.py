"""What a tenant may take, over real sockets: refusals, what is kept for who comes again, and resumption."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from lorafleet import AsyncClient
from lorafleet.errors import ACCEPTED, ANSWER_ID
from lorafleet.v1 import inference_pb2
from scheduler.ledger.answer_id import MOST_TIMES
from tests.support.services.failures import Failure, failure_of
from tests.support.services.scheduler_house import House, generate, open_house, read
from tests.support.services.scheduling import until


def tenants_file(folder: Path, text: str) -> Path:
    file = folder / "tenants.toml"
    file.write_text(f"[default]\n{text}\n", encoding="utf-8")
    return file


async def refused(call: object) -> Failure:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return failure_of(caught.value)


def no_more_text(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house.scheduler._admission, "admit", None)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ("requests_per_minute = 60", "REQUEST_RATE"),
        ("prompt_tokens_per_minute = 60", "PROMPT_TOKEN_RATE"),
        ("output_tokens_per_minute = 720", "OUTPUT_TOKEN_RATE"),
    ],
)
async def test_a_rate_refuses_before_anything_is_spent(
    limits: str, reason: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A burst is one request."""
    file = tenants_file(tmp_path, f"{limits}\nburst_seconds = 0.5")
    async with open_house(model, tenants_file=file) as house:
        house.fake.frozen = True
        first = house.inference.Generate(generate())
        await until(lambda: house.scheduler.dispatcher.num_live == 1)
        with monkeypatch.context() as patch:
            no_more_text(house, patch)
            failure = await refused(house.inference.Generate(generate(request_id="second")))
        assert (failure.code, failure.reason) == ("RESOURCE_EXHAUSTED", reason)
        assert failure.retry_s is not None and failure.retry_s > 0
        house.fake.frozen = False
        await first
        refusals = house.scheduler._registry.get_sample_value(
            "lorafleet_scheduler_refusals_total",
            {"code": "RESOURCE_EXHAUSTED", "reason": reason, "method": "/lorafleet.v1.Inference/Generate"},
        )
        assert refusals == 1


async def lost(house: House) -> str:
    """The answer_id of a request that was accepted, and whose client is gone."""
    house.fake.frozen = True
    stream = house.inference.GenerateStream(generate(request_id="mine"))
    told = str(dict(await stream.initial_metadata())[ANSWER_ID])
    stream.cancel()
    await until(lambda: house.scheduler.dispatcher.num_live == 0)
    house.fake.frozen = False
    return told


async def again(
    house: House, told: str, request_id: str = "mine", **fields: Any
) -> inference_pb2.GenerateResponse:
    request = generate(request_id=request_id, **fields)
    answer = await house.inference.Generate(request, metadata=(ACCEPTED, (ANSWER_ID, told)))
    assert isinstance(answer, inference_pb2.GenerateResponse)
    return answer


async def test_what_was_accepted_goes_on_elsewhere_whatever_the_quota(model: Path, tmp_path: Path) -> None:
    """Of one burst. At another scheduler of the same store, too, and at one that was started later."""
    file = tenants_file(tmp_path, "requests_per_minute = 1")
    async with open_house(model, tenants_file=file) as other:
        async with open_house(model, tenants_file=file) as house:
            told = await lost(house)
            assert (await refused(house.inference.Generate(generate()))).reason == "REQUEST_RATE"
            assert (await again(house, told)).answer_id == f"{told.partition('.')[0]}.1"
        await other.inference.Generate(generate())
        assert (await refused(other.inference.Generate(generate()))).reason == "REQUEST_RATE"
        assert (await again(other, told)).token_ids
    async with open_house(model, tenants_file=file) as later:
        await later.inference.Generate(generate())
        resume = inference_pb2.Resume(seed=1, answer_id=told)
        assert (await later.inference.Generate(generate(request_id="mine", resume=resume))).token_ids
        await again(later, told)
        await again(later, told)
        assert (await refused(again(later, told))).reason == "REQUEST_RATE"  # It has been paid for once.


async def test_what_only_says_that_it_was_accepted_is_a_new_request(model: Path, tmp_path: Path) -> None:
    """As long as there is a quota for one, it is let in, and gets a name of its own."""
    file = tenants_file(tmp_path, "requests_per_minute = 1\nburst_seconds = 120")
    async with open_house(model, tenants_file=file) as house:
        told = await lost(house)
        key, part = told.split(".")
        assert (await again(house, told, "other")).answer_id[: len(key)] != key
        forged = key[:-1] + ("0" if key[-1] != "0" else "1")
        for call in (
            house.inference.Generate(generate(), metadata=(ACCEPTED,)),
            house.inference.Generate(generate(request_id="mine", resume=inference_pb2.Resume(seed=1))),
            again(house, f"{forged}.{part}"),
            again(house, told, "other"),
            again(house, told, text="The quick brown"),
            again(house, told, max_new_tokens=50),
        ):
            assert (await refused(call)).reason == "REQUEST_RATE"
        assert (await again(house, told)).token_ids


async def test_what_a_client_says_to_have_got_is_charged_as_its_prompt(model: Path, tmp_path: Path) -> None:
    file = tenants_file(tmp_path, "prompt_tokens_per_minute = 20\nburst_seconds = 60")
    async with open_house(model, tenants_file=file) as house:
        resume = inference_pb2.Resume(seed=1, output_token_ids=[5] * 40)
        await house.inference.Generate(generate(max_new_tokens=41, resume=resume))
        failure = await refused(house.inference.Generate(generate()))
        assert failure.reason == "PROMPT_TOKEN_RATE" and failure.retry_s is not None and failure.retry_s > 60


async def test_of_what_was_accepted_there_are_twice_as_many_streams(model: Path, tmp_path: Path) -> None:
    async with open_house(model, tenants_file=tenants_file(tmp_path, "max_streams = 1")) as house:
        told = await lost(house)
        house.fake.frozen = True
        calls = [asyncio.ensure_future(house.inference.Generate(generate()))]
        await until(lambda: house.scheduler.dispatcher.num_live == 1)
        assert (await refused(house.inference.Generate(generate()))).reason == "TOO_MANY_STREAMS"
        calls.append(asyncio.ensure_future(again(house, told)))
        await until(lambda: house.scheduler.dispatcher.num_live == 2)
        assert (await refused(again(house, told))).reason == "TOO_MANY_STREAMS"
        house.fake.frozen = False
        assert all(answer.token_ids for answer in await asyncio.gather(*calls))


async def test_what_an_answer_did_not_use_is_given_back(model: Path, tmp_path: Path) -> None:
    file = tenants_file(tmp_path, "output_tokens_per_minute = 60\nburst_seconds = 100")
    async with open_house(model, tenants_file=file) as house:
        house.fake.frozen = True
        stream = house.inference.GenerateStream(generate(max_new_tokens=90))
        await until(lambda: house.scheduler.dispatcher.num_live == 1)
        failure = await refused(house.inference.Generate(generate(max_new_tokens=50)))
        assert failure.reason == "OUTPUT_TOKEN_RATE" and failure.retry_s == pytest.approx(40, abs=5)
        stream.cancel()
        await until(lambda: house.scheduler.dispatcher.num_live == 0)
        house.fake.frozen = False
        assert (await house.inference.Generate(generate(max_new_tokens=50))).token_ids


async def test_streams_are_counted_and_a_change_of_the_file_counts(model: Path, tmp_path: Path) -> None:
    file = tenants_file(tmp_path, "max_streams = 2")
    async with open_house(model, tenants_file=file) as house:
        house.fake.frozen = True
        calls = [house.inference.GenerateStream(generate()) for _ in range(2)]
        await until(lambda: house.scheduler.dispatcher.num_live == 2)
        failure = await refused(house.inference.Generate(generate()))
        assert (failure.code, failure.reason) == ("RESOURCE_EXHAUSTED", "TOO_MANY_STREAMS")
        assert failure.retry_s is not None and failure.retry_s >= 0.1
        tenants_file(tmp_path, "max_streams = 100 # more")
        await until(lambda: house.scheduler._tenants.limits("default").max_streams == 100)
        calls.append(house.inference.GenerateStream(generate()))
        await until(lambda: house.scheduler.dispatcher.num_live == 3)
        house.fake.frozen = False
        assert all([await read(call) for call in calls])


async def test_a_client_that_may_comes_again_when_it_was_told_to(model: Path, tmp_path: Path) -> None:
    """Nine at once, of which six may begin: the others half a second after each other."""
    file = tenants_file(tmp_path, "requests_per_minute = 120\nburst_seconds = 3")
    async with (
        open_house(model, tenants_file=file) as house,
        AsyncClient(house.scheduler.address, refused_attempts=2) as client,
    ):
        answers = [client.generate("The quick", max_new_tokens=2) for _ in range(9)]
        assert all(answer.token_ids for answer in await asyncio.gather(*answers))


async def test_of_a_request_id_that_is_too_long_nothing_is_kept(model: Path, tmp_path: Path) -> None:
    file = tenants_file(tmp_path, "requests_per_minute = 1\nmax_streams = 1")
    async with open_house(model, tenants_file=file) as house:
        await house.inference.Generate(generate())
        failure = await refused(house.inference.Generate(generate(request_id="x" * 1_000_000)))
        assert (failure.code, failure.reason) == ("INVALID_ARGUMENT", "INVALID_REQUEST")


async def test_many_who_come_at_once_with_one_answer_id_have_paid_for_few(
    model: Path, digest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a request id none of them supersedes another."""
    file = tenants_file(tmp_path, "requests_per_minute = 1")
    async with open_house(model, tenants_file=file) as house:
        told = (await house.inference.Generate(generate(request_id=""))).answer_id
        admission, all_came = house.scheduler._admission, asyncio.Event()
        admit, came = admission.admit, list[None]()

        async def admit_together(*args: Any, **named: Any) -> object:
            came.append(None)
            if len(came) == 20:
                all_came.set()
            await all_came.wait()
            return await admit(*args, **named)

        monkeypatch.setattr(admission, "admit", admit_together)
        results = await asyncio.gather(*(again(house, told, "") for _ in range(20)), return_exceptions=True)
        answers = [each for each in results if not isinstance(each, BaseException)]
        assert len(answers) == MOST_TIMES
        failures = [failure_of(each) for each in results if isinstance(each, grpc.aio.AioRpcError)]
        assert {each.reason for each in failures} == {"REQUEST_RATE"} and len(failures) == 20 - MOST_TIMES


async def test_what_is_read_again_of_a_lost_answer_is_charged(model: Path, tmp_path: Path) -> None:
    """It is never refused for it."""
    file = tenants_file(tmp_path, "prompt_tokens_per_minute = 20\nburst_seconds = 60")
    async with open_house(model, tenants_file=file) as house:
        told = (await house.inference.Generate(generate(request_id="mine", max_new_tokens=41))).answer_id
        resume = inference_pb2.Resume(seed=1, output_token_ids=[5] * 40, answer_id=told)
        assert (await again(house, "", max_new_tokens=41, resume=resume)).answer_id.endswith(".1")
        failure = await refused(house.inference.Generate(generate()))
        assert failure.reason == "PROMPT_TOKEN_RATE" and failure.retry_s is not None and failure.retry_s > 60
