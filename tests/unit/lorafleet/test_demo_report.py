"""What the demo makes of answers and page-ins, and how it shows them."""

import asyncio
import io
from collections import Counter

import grpc.aio
import pytest

from lorafleet import AsyncClient
from lorafleet.commands import demo as command
from lorafleet.demo import run
from lorafleet.demo.live import LiveView, PlainView, make_view
from lorafleet.v1 import adapters_pb2, adapters_pb2_grpc

DIGESTS = {"pirate": "sha256:" + "a" * 64, "shout": "sha256:" + "b" * 64}


def answer(adapter: str, text: str = "hi", digest: str | None = None) -> run.Answer:
    digest = DIGESTS.get(adapter, "") if digest is None else digest
    return run.Answer(adapter, digest, "why?", text, 10, "stop", ttft_s=0.5, tokens_per_s=20.0)


def test_answers_and_page_ins_become_a_row_for_each_adapter() -> None:
    page_ins = Counter({DIGESTS["pirate"]: 2, DIGESTS["shout"]: 1})
    answers = [answer(name) for name in ("base", *DIGESTS)] * 2
    result = run._report(2, DIGESTS, answers, page_ins)
    assert [(r.adapter, r.tokens, r.slot_hits, r.page_ins) for r in result.rows] == [
        ("base", 20, 0, 0),
        ("pirate", 20, 0, 2),
        ("shout", 20, 1, 1),
    ]
    assert (result.slot_hits, result.page_ins, result.problems) == (1, 3, ())
    text = command._table(result)
    assert "pirate" in text
    assert "2 slots: 3 page-ins, 1 slot hits" in text


def test_the_demo_fails_when_it_did_not_show_what_it_should() -> None:
    answers = [answer("base"), answer("pirate", text=" \n"), answer("shout", digest="")]
    assert run._report(2, DIGESTS, answers, Counter()).problems == (
        "pirate gave no answer to 'why?'",
        "shout was answered by the base model",
        "no adapter was paged in",
    )


async def test_page_ins_are_counted_by_what_appears_in_a_slot() -> None:
    """Real calls to a server whose residency changes with every call."""
    states = [[], [("a", 0)], [("a", 0), ("b", 1)], [("c", 0), ("b", 1)], [("a", 0), ("b", 1)]]
    done = asyncio.Event()

    class Residency(adapters_pb2_grpc.AdaptersServicer):
        async def Residency(self, request: object, context: object) -> adapters_pb2.ResidencyResponse:
            response = adapters_pb2.ResidencyResponse()
            for digest, slot in states[0]:
                response.copies.add(
                    executor="e", digest=digest, slot=slot, tier=adapters_pb2.RESIDENCY_TIER_SLOT
                )
                response.copies.add(executor="e", digest=digest, tier=adapters_pb2.RESIDENCY_TIER_HOST)
            if len(states) > 1:
                states.pop(0)
            else:
                done.set()
            return response

    server = grpc.aio.server()
    adapters_pb2_grpc.add_AdaptersServicer_to_server(Residency(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    page_ins: Counter[str] = Counter()
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        counting = asyncio.create_task(run._count_page_ins(client, page_ins))
        await done.wait()
        await asyncio.sleep(0.1)
        counting.cancel()
    await server.stop(None)
    assert page_ins == {"a": 2, "b": 1, "c": 1}


def drive(view: PlainView | LiveView) -> None:
    with view:
        for question in ("one?", "two?"):
            view.ask(question, ["base", "pirate"])
            view.show("pirate", "Arr")
            view.answered("pirate", "Arr, [bold]\nmatey")
            view.answered("base", "Hello")


def test_plain_lines_where_there_is_no_terminal() -> None:
    output = io.StringIO()
    view = make_view(output)
    assert isinstance(view, PlainView)
    drive(view)
    assert output.getvalue().split("\n")[:4] == ["", "one?", "  [pirate] Arr, [bold] matey", "  [base] Hello"]


def test_live_rows_in_a_terminal() -> None:
    pytest.importorskip("rich")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    output = Terminal()
    view = make_view(output)
    assert isinstance(view, LiveView)
    drive(view)
    assert "Arr, [bold] matey" in output.getvalue()
    assert "one?" in output.getvalue() and "two?" in output.getvalue()
