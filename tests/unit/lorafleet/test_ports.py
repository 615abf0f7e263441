import errno
from contextlib import ExitStack

import pytest

from lorafleet.ports import hold_port


@pytest.fixture
def sockets() -> ExitStack:
    return ExitStack()


def test_free_ports_differ_and_are_nobody_elses_while_held(sockets: ExitStack) -> None:
    with sockets:
        ports = [hold_port(sockets, "127.0.0.1", 0) for _ in range(200)]
        assert len(set(ports)) == len(ports)
        with ExitStack() as others, pytest.raises(OSError) as error:
            hold_port(others, "127.0.0.1", ports[0])
        assert error.value.errno == errno.EADDRINUSE
    with ExitStack() as others:
        assert hold_port(others, "127.0.0.1", ports[0]) == ports[0]


def test_no_outgoing_connection_gets_a_free_port(sockets: ExitStack) -> None:
    """Linux gives them ports from 32768 on, unless it is told otherwise."""
    with sockets:
        assert all(hold_port(sockets, "127.0.0.1", 0) < 32768 for _ in range(50))


def test_a_host_of_others_is_the_systems_error(sockets: ExitStack) -> None:
    with sockets, pytest.raises(OSError) as error:
        hold_port(sockets, "192.0.2.1", 0)
    assert error.value.errno == errno.EADDRNOTAVAIL


def test_all_taken_is_an_error_too(sockets: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    with sockets:
        port = hold_port(sockets, "127.0.0.1", 0)
        monkeypatch.setattr("random.sample", lambda among, count: [port])
        with pytest.raises(OSError, match="is free") as error:
            hold_port(sockets, "127.0.0.1", 0)
    assert error.value.errno == errno.EADDRINUSE
