import errno
import socket
from contextlib import ExitStack

import pytest

from lorafleet.ports import free_port, hold_port


@pytest.fixture
def stack() -> ExitStack:
    return ExitStack()


def test_free_ports_differ_and_are_found_once(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    with stack:
        ports = [free_port(stack, "127.0.0.1") for _ in range(200)]
        assert len(set(ports)) == len(ports)
        monkeypatch.setattr("random.sample", lambda among, count: ports)
        with ExitStack() as others, pytest.raises(OSError, match="is free") as error:
            free_port(others, "127.0.0.1")
        assert error.value.errno == errno.EADDRINUSE
    with ExitStack() as others:
        assert free_port(others, "127.0.0.1") == ports[0]


def test_a_service_listens_on_a_reserved_port_and_comes_back(stack: ExitStack) -> None:
    with stack:
        port = free_port(stack, "127.0.0.1")
        for _ in range(2):
            with socket.create_server(("127.0.0.1", port)) as service:
                client = socket.create_connection(service.getsockname())
                service.accept()[0].close()  # first, so that the system keeps the connection for a while
                client.close()


def test_where_somebody_listens_is_no_free_port(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    with stack:
        (taken, free) = (free_port(stack, "127.0.0.1") for _ in range(2))
    monkeypatch.setattr("random.sample", lambda among, count: [taken, free])
    with socket.create_server(("127.0.0.1", taken)), ExitStack() as reserved:
        assert free_port(reserved, "127.0.0.1") == free


def test_no_outgoing_connection_gets_a_free_port(stack: ExitStack) -> None:
    """Linux gives them ports from 32768 on, unless it is told otherwise."""
    with stack:
        assert all(free_port(stack, "127.0.0.1") < 32768 for _ in range(50))


def test_a_held_port_is_nobody_elses(stack: ExitStack) -> None:
    with ExitStack() as reserved:
        port = free_port(reserved, "127.0.0.1")
    with stack:
        hold_port(stack, "127.0.0.1", port)
        with ExitStack() as others, pytest.raises(OSError) as error:
            hold_port(others, "127.0.0.1", port)
        assert error.value.errno == errno.EADDRINUSE
    with ExitStack() as others:
        hold_port(others, "127.0.0.1", port)


def test_a_host_of_others_is_the_systems_error(stack: ExitStack) -> None:
    with stack, pytest.raises(OSError) as error:
        free_port(stack, "192.0.2.1")
    assert error.value.errno == errno.EADDRNOTAVAIL
