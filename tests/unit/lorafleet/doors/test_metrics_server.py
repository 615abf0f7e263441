"""Any number of connections to the metrics port take a bounded number of threads, and keep nobody out."""

import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry, Counter

from lorafleet.doors import metrics_server
from lorafleet.doors.metrics_server import MAX_CONNECTIONS, MetricsServer


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    registry = CollectorRegistry()
    Counter("things", "Things.", registry=registry).inc(3)
    server = MetricsServer("127.0.0.1", 0, registry)
    yield server
    server.close()


def scrape(server: MetricsServer) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=20) as answer:
        return str(answer.read().decode())


def test_idle_connections_take_few_threads_and_a_scrape_is_answered(server: MetricsServer) -> None:
    before = threading.active_count()
    with ExitStack() as stack:
        for number in range(5 * MAX_CONNECTIONS):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            if number % 2:
                connection.sendall(b"GET /metrics HT")
        assert "things_total 3.0" in scrape(server)
        deadline = time.monotonic() + 60  # Threads that have closed theirs may not have had a core yet.
        while threading.active_count() - before > MAX_CONNECTIONS:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_who_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "IDLE_S", 0.05)
    server = MetricsServer("127.0.0.1", 0, CollectorRegistry())
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        assert connection.recv(1) == b""
    server.close()


def test_an_address_that_is_taken_is_an_error(server: MetricsServer) -> None:
    with pytest.raises(OSError):
        MetricsServer("127.0.0.1", server.port, CollectorRegistry())


def test_another_family(server: MetricsServer) -> None:
    six = MetricsServer("::1", 0, CollectorRegistry())
    with socket.create_connection(("::1", six.port), timeout=20):
        pass
    six.close()
