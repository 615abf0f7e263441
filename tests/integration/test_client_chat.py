"""`lorafleet chat` against a real server that tells what it was sent."""

import io
import sys
from collections.abc import AsyncIterator, Iterator

import grpc
import grpc.aio
import pytest

from lorafleet.cli import main
from lorafleet.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.support.services.scripted_server import serving


class Telling(inference_pb2_grpc.InferenceServicer):
    """Answers "<adapter or base> was told <all messages>" in two chunks; refuses the adapter "none"."""

    async def GenerateStream(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateChunk]:
        if request.adapter == "none":
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no adapter 'none'")
        who = request.adapter if request.HasField("adapter") else "base"
        told = " | ".join(f"{m.role}: {m.content}" for m in request.chat.messages)
        yield inference_pb2.GenerateChunk(token_ids=[1], text=f"{who} was told ")
        yield inference_pb2.GenerateChunk(
            output_index=1,
            token_ids=[2],
            text=f"<{told}>",
            finish_reason=common_pb2.FINISH_REASON_STOP,
            usage=inference_pb2.Usage(completion_tokens=2),
        )


@pytest.fixture(autouse=True)
def target(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with serving(
        lambda server: inference_pb2_grpc.add_InferenceServicer_to_server(Telling(), server)
    ) as address:
        monkeypatch.setenv("LORAFLEET_TARGET", address)
        yield


def chat(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lines: list[str],
    *args: str,
    status: int = 0,
) -> tuple[list[str], list[str]]:
    """What the conversation writes to stdout and to stderr; status: how the command ends."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    assert main(["chat", *args]) == status
    out, err = capsys.readouterr()
    return out.splitlines(), err.splitlines()


def test_the_conversation_is_remembered_and_reset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = chat(monkeypatch, capsys, ["one", "", "two", "/reset", "three"], "--system", "Be brief.")
    first = "base was told <system: Be brief. | user: one>"
    assert out == [
        first,
        f"base was told <system: Be brief. | user: one | assistant: {first} | user: two>",
        "base was told <system: Be brief. | user: three>",
    ]
    assert err == []


def test_adapters_are_switched_and_exit_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["/adapter acme/x", "one", "/reset", "/adapter", "two", "/exit", "never"]
    out, _ = chat(monkeypatch, capsys, lines, "--adapter", "first")
    assert out == ["acme/x was told <user: one>", "base was told <user: two>"]


def test_a_failed_question_is_forgotten_and_told_to_a_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = chat(monkeypatch, capsys, ["/adapter none", "one", "/adapter a", "two", "/what"], status=1)
    assert out == ["a was told <user: two>"]
    assert err[0].startswith("error: there is no adapter 'none'; ")
    assert err[1].startswith("/adapter NAME")
