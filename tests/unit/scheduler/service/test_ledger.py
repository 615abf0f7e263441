"""What a whole scheduler records of its answers, and what it does while it cannot."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_status import rpc_status

from lorafleet.usage.record import Record
from lorafleet.v1 import inference_pb2
from scheduler.app import INFERENCE
from tests.support.ledger import records_in
from tests.support.services.scheduler_house import House, fails, generate, open_house, read
from tests.support.services.scheduling import until
from tests.support.stores.small_disk import files_of_at_most


def usage_of(record: Record) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=record.prompt,
        cached_prompt_tokens=record.cached,
        completion_tokens=record.output,
    )


@contextmanager
def full_disk() -> Iterator[None]:
    """For this process: whatever file it writes, new ones too."""
    with files_of_at_most(0):
        yield


async def test_a_record_is_there_when_the_last_chunk_comes(model: Path, tmp_path: Path) -> None:
    """The request's id is the client's own, who may use one twice: that makes two answers."""
    async with open_house(model, ledger_dir=tmp_path) as house:
        answer_id = ""
        async for chunk in house.inference.GenerateStream(generate(request_id="mine")):
            answer_id = answer_id or chunk.answer_id
            if chunk.finish_reason:
                [record] = records_in(tmp_path)
                assert f"{record.key}.{record.part}" == answer_id
                assert usage_of(record) == chunk.usage
                assert (record.outcome, record.tenant, record.adapter) == ("LENGTH", "default", "")
        answer = await house.inference.Generate(generate(request_id="mine"))
        first, whole = records_in(tmp_path)
        assert (answer.answer_id, answer.usage) == (f"{whole.key}.0", usage_of(whole))
        assert first.key != whole.key
        _check_counts(house, first, whole)


async def test_a_resumption_is_the_next_part_of_its_answer(model: Path, tmp_path: Path) -> None:
    """What was lost before its first chunk, too: its name is in the headers, and comes back in those of the
    call that asks for the answer again."""
    async with open_house(model, ledger_dir=tmp_path) as house:
        chunks = await read(house.inference.GenerateStream(generate()))
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        resume = inference_pb2.Resume(
            seed=chunks[0].seed, output_token_ids=tokens[:5], answer_id=chunks[0].answer_id
        )
        again = await read(house.inference.GenerateStream(generate(resume=resume)))
        first, second = records_in(tmp_path)
        assert (second.key, second.part, second.resumed) == (first.key, 1, 5)
        assert second.output == first.output == 12
        assert again[0].answer_id == f"{first.key}.1"
        metadata = (("lorafleet-answer-id", again[0].answer_id),)
        call = house.inference.GenerateStream(generate(), metadata=metadata)
        assert dict(await call.initial_metadata())["lorafleet-answer-id"] == f"{first.key}.2"
        await read(call)
        assert (records_in(tmp_path)[-1].key, records_in(tmp_path)[-1].part) == (first.key, 2)


async def test_who_leaves_is_recorded_and_who_is_refused_is_not(model: Path, tmp_path: Path) -> None:
    async with open_house(model, ledger_dir=tmp_path) as house:
        await fails(house.inference.Generate(generate(adapter="nobody")))
        for told in ("x", "ab.0", "ab" * 16, "ab" * 16 + ".-1", "AB" * 16 + ".1"):
            resume = inference_pb2.Resume(seed=1, answer_id=told)
            code, _, message = await fails(house.inference.Generate(generate(resume=resume)))
            assert code is grpc.StatusCode.INVALID_ARGUMENT and "resume.answer_id" in message
        assert records_in(tmp_path) == []
        house.fake.frozen = True
        call = house.inference.GenerateStream(generate())
        await call.initial_metadata()
        call.cancel()
        await until(lambda: records_in(tmp_path))
        [record] = records_in(tmp_path)
        assert (record.outcome, record.output) == ("CANCELLED", 0)


async def test_while_the_disk_is_full_accepted_requests_go_on(model: Path, tmp_path: Path) -> None:
    """New ones are refused, those that were accepted before are taken up again, and no record is lost."""
    async with open_house(model, ledger_dir=tmp_path) as house:
        await house.inference.Generate(generate())
        with full_disk():
            chunks = await read(house.inference.GenerateStream(generate()))
            assert chunks[-1].usage.completion_tokens == 12
            await _refuses(house)
            resume = inference_pb2.Resume(seed=chunks[0].seed, answer_id=chunks[0].answer_id)
            await read(house.inference.GenerateStream(generate(resume=resume)))
            serving = health_pb2.HealthCheckResponse.NOT_SERVING
            while await house.health(INFERENCE) != serving:
                await asyncio.sleep(0.02)
            assert _gauge(house, "lorafleet_scheduler_ledger_unwritten_records") == 2
            assert len(records_in(tmp_path)) == 1
        while await house.health(INFERENCE) != health_pb2.HealthCheckResponse.SERVING:
            await asyncio.sleep(0.02)
        await house.inference.Generate(generate())
        assert [record.part for record in records_in(tmp_path)] == [0, 0, 1, 0]
        assert _gauge(house, "lorafleet_scheduler_ledger_unwritten_records") == 0


def _check_counts(house: House, *seen: Record) -> None:
    labels = {"tenant": "default", "outcome": "LENGTH"}
    assert _gauge(house, "lorafleet_scheduler_answers_total", **labels) == len(seen)
    for kind in ("prompt", "output"):
        total = _gauge(house, "lorafleet_scheduler_answer_tokens_total", kind=kind, **labels)
        assert total == sum(getattr(record, kind) for record in seen)


async def _refuses(house: House) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await house.inference.Generate(generate())
    status, info, retry = (
        rpc_status.from_call(caught.value),
        error_details_pb2.ErrorInfo(),
        error_details_pb2.RetryInfo(),
    )
    assert status is not None and caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert any(detail.Unpack(info) for detail in status.details) and info.reason == "LEDGER_UNAVAILABLE"
    assert any(detail.Unpack(retry) for detail in status.details) and retry.retry_delay.seconds == 1


def _gauge(house: House, name: str, **labels: str) -> float | None:
    return house.scheduler._registry.get_sample_value(name, labels)
