"""What the demo makes of answers and metrics, and how it shows them."""

import io
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from lorafleet.commands import demo as command
from lorafleet.demo import run
from lorafleet.demo.live import LiveView, PlainView, make_view

DIGESTS = {"pirate": "sha256:" + "a" * 64, "shout": "sha256:" + "b" * 64}
METRICS = f"""\
# TYPE lorafleet_executor_page_ins_total counter
lorafleet_executor_page_ins_total{{digest="{DIGESTS["pirate"]}"}} 2.0
lorafleet_executor_page_ins_total{{digest="{DIGESTS["shout"]}"}} 1.0
# TYPE lorafleet_executor_slot_hits_total counter
lorafleet_executor_slot_hits_total{{digest="{DIGESTS["shout"]}"}} 1.0
# TYPE lorafleet_executor_steps_total counter
lorafleet_executor_steps_total 9.0
"""


class _Metrics(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(METRICS.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def metrics_url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Metrics)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    thread.join()
    server.server_close()


def answer(adapter: str, text: str = "hi", digest: str | None = None) -> run.Answer:
    digest = DIGESTS.get(adapter, "") if digest is None else digest
    return run.Answer(adapter, digest, "why?", text, 10, "stop", ttft_s=0.5, tokens_per_s=20.0)


def report(answers: list[run.Answer], slots: run._Slots) -> run.Report:
    return run._report(2, DIGESTS, answers, slots)


def test_metrics_become_a_row_for_each_adapter(metrics_url: str) -> None:
    slots = run._read_slots([metrics_url])
    result = report([answer(name) for name in ("base", *DIGESTS)] * 2, slots)
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
    slots = run._Slots({}, {})
    answers = [answer("base"), answer("pirate", text=" \n"), answer("shout", digest="")]
    assert report(answers, slots).problems == (
        "pirate gave no answer to 'why?'",
        "shout was answered by the base model",
        "no adapter was paged in",
    )


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
