"""What a tenant may take, over real sockets: refusals, what is kept for who comes again, and resumption."""

import asyncio
from pathlib import Path

import grpc
import pytest

from lorafleet import AsyncClient
from lorafleet.errors import ACCEPTED
from lorafleet.v1 import inference_pb2
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
async def test_a_rate_refuses_before_anything_is_spent_and_never_what_was_accepted(
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
        resumed = generate(request_id="lost", resume=inference_pb2.Resume(seed=1))
        calls = [
            house.inference.Generate(resumed),
            house.inference.Generate(generate(request_id="other"), metadata=(ACCEPTED,)),
        ]
        await until(lambda: house.scheduler.dispatcher.num_live == 3)
        house.fake.frozen = False
        await asyncio.gather(first, *calls)
        refusals = house.scheduler._registry.get_sample_value(
            "lorafleet_scheduler_refusals_total",
            {"code": "RESOURCE_EXHAUSTED", "reason": reason, "method": "/lorafleet.v1.Inference/Generate"},
        )
        assert refusals == 1


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
