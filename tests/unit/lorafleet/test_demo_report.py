"""What the demo makes of answers and page-ins, and how it shows them."""

import io
from collections import Counter

import pytest
from prometheus_client import CollectorRegistry, start_http_server

from executor.batch.batcher import StepPlan
from executor.metrics import Metrics
from lorafleet.commands import demo as command
from lorafleet.demo import run
from lorafleet.demo.counts import SlotCounts, read_counts
from lorafleet.demo.live import LiveView, PlainView, make_view

DIGESTS = {"pirate": "sha256:" + "a" * 64, "shout": "sha256:" + "b" * 64}


def answer(adapter: str, text: str = "hi", digest: str | None = None) -> run.Answer:
    digest = DIGESTS.get(adapter, "") if digest is None else digest
    return run.Answer(adapter, digest, "why?", text, 10, "stop", ttft_s=0.5, tokens_per_s=20.0)


def test_answers_and_page_ins_become_a_row_for_each_adapter() -> None:
    counts = SlotCounts(
        page_ins=Counter({DIGESTS["pirate"]: 2, DIGESTS["shout"]: 1}),
        slot_hits=Counter({DIGESTS["shout"]: 1}),
    )
    answers = [answer(name) for name in ("base", *DIGESTS)] * 2
    result = run._report(2, DIGESTS, answers, counts)
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
    assert run._report(2, DIGESTS, answers, SlotCounts()).problems == (
        "pirate gave no answer to 'why?'",
        "shout was answered by the base model",
        "no adapter was paged in",
    )


def test_the_demo_fails_when_an_answer_does_not_fit_its_schema() -> None:
    whole, cut = '{"topic": "sky", "answer": "It is blue."}', '{"topic": "sky'
    counts = SlotCounts(page_ins=Counter({"sha256:c": 1}))
    for text, problems in ((whole, 0), (cut, 1), ('{"answer": ""}', 1), ("[1]", 1)):
        found = run._report(
            2, {"json": "sha256:c"}, [answer("base"), answer("json", text, "sha256:c")], counts
        )
        assert len(found.problems) == problems


def test_counts_are_read_from_the_executors_metrics() -> None:
    """From real instruments, and added up over two executors."""
    urls, servers = [], []
    for hits in (1, 2):
        registry = CollectorRegistry()
        metrics = Metrics(registry)
        metrics.step_done(StepPlan(slot_hits=[DIGESTS["pirate"]] * hits), 0, 0.1)
        metrics.paged_in(DIGESTS["shout"])
        servers.append(start_http_server(0, "127.0.0.1", registry)[0])
        urls.append(f"http://127.0.0.1:{servers[-1].server_port}/metrics")
    counts = read_counts(urls)
    assert (counts.slot_hits, counts.page_ins) == ({DIGESTS["pirate"]: 3}, {DIGESTS["shout"]: 2})
    for server in servers:
        server.shutdown()
        server.server_close()


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
