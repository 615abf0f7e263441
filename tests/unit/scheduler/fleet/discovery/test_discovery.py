"""Names and files tell of executors, over a real name server; what fails to tell keeps what is known."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import dns.asyncresolver
import pytest

from scheduler.fleet.discovery import dns_source
from scheduler.fleet.discovery.discovery import Discovery
from scheduler.fleet.discovery.source import MAX_FOUND, DiscoveryError
from scheduler.fleet.endpoint import Endpoint
from tests.support.services.name_server import NameServer, name_server

NAME, SERVICE = "fleet.test", "_grpc._tcp.fleet.test"


class Told:
    """A discovery, and what it tells. Its sources are asked by `look`, not by time."""

    def __init__(self, *flags: str) -> None:
        self.settled: list[list[Endpoint]] = []
        self.failed: list[str] = []
        settle = lambda found: self.settled.append(list(found))  # noqa: E731
        self._discovery = Discovery(flags, 3600.0, settle, self.failed.append)

    @property
    def known(self) -> list[str]:
        return [
            f"{each.name}={each.address}" if each.pod else each.name for each in self._discovery.endpoints()
        ]

    @property
    def endpoints(self) -> list[Endpoint]:
        return self._discovery.endpoints()

    async def look(self) -> list[str]:
        for source in self._discovery._sources:
            await self._discovery.look(source)
        return self.known


@pytest.fixture
async def names() -> AsyncIterator[NameServer]:
    async with name_server() as started:
        yield started


def put_pods(names: NameServer, *numbers: int) -> None:
    names.put(SERVICE, "SRV", [f"0 10 50061 pod-{number}.{NAME}." for number in numbers])
    for number in numbers:
        names.put(f"pod-{number}.{NAME}", "A", [f"10.0.0.{number}"])


async def test_addresses_of_a_name(names: NameServer) -> None:
    told = Told(names.target(NAME, 50061), "listed:1")
    assert told.known == ["listed:1"]
    assert await told.look() == ["listed:1"]  # There is no such name.
    names.put(NAME, "AAAA", ["fd00::2", "fd00::1"])
    assert await told.look() == ["listed:1", "[fd00::1]:50061", "[fd00::2]:50061"]
    names.put(NAME, "A", ["10.0.0.2", "10.0.0.1"])  # Of the same pods.
    assert await told.look() == ["listed:1", "10.0.0.1:50061", "10.0.0.2:50061"]
    assert told.endpoints[1].tls_name == NAME
    names.put(NAME, "A", [])
    names.put(NAME, "AAAA", [])
    names.put(NAME, "TXT", ["x"])  # The name is there, and has no address.
    assert await told.look() == ["listed:1"]
    assert told.failed == [] and len(told.settled) == 4


@pytest.mark.parametrize("brings", [True, False])
async def test_pods_of_a_service_have_names_and_ports_of_their_own(names: NameServer, brings: bool) -> None:
    names.brings_addresses = brings
    put_pods(names, 1, 0, 2)
    names.put(f"pod-2.{NAME}", "A", [])  # Has gone since.
    told = Told(names.target(NAME, 1))
    assert await told.look() == ["pod-0=10.0.0.0:50061", "pod-1=10.0.0.1:50061"]
    assert told.endpoints[0].tls_name == f"pod-0.{NAME}"
    names.put(f"pod-1.{NAME}", "A", ["10.9.9.9"])
    assert await told.look() == ["pod-0=10.0.0.0:50061", "pod-1=10.9.9.9:50061"]
    assert await Told(f"dns://{names.authority}/{SERVICE}").look() == told.known


@pytest.mark.parametrize("flag", ["/fleet.test:1", "/_grpc._tcp.fleet.test"])
async def test_the_name_in_a_pods_certificate_is_as_long_as_the_name_that_was_asked_for(
    names: NameServer, flag: str
) -> None:
    """What a cluster adds to names is in no manifest; a name elsewhere is what it is."""
    targets = [f"pod-0.{NAME}", f"pod-1.{NAME}.svc.cluster.local", "gpu.elsewhere.test"]
    names.put(SERVICE, "SRV", [f"0 10 9 {target}." for target in targets])
    for target in targets:
        names.put(target, "A", ["10.0.0.1"])
    names.put(targets[1], "A", ["10.0.0.2"])
    names.put(targets[2], "A", ["10.0.0.3"])
    told = Told(f"dns://{names.authority}{flag}")
    await told.look()
    assert {each.pod: each.tls_name for each in told.endpoints} == {
        "pod-0": f"pod-0.{NAME}",
        "pod-1": f"pod-1.{NAME}",
        "gpu": "gpu.elsewhere.test",
    }


async def test_a_short_name_is_looked_for_as_this_machine_looks_for_names(
    names: NameServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a pod: the manifest says fleet, and the search list the rest."""
    file = tmp_path / "resolv.conf"
    file.write_text("nameserver 127.0.0.1\nsearch ns.svc.cluster.local cluster.local\noptions ndots:5\n")
    config = dns.asyncresolver.Resolver(filename=str(file))
    config.port = names.port
    monkeypatch.setattr(dns.asyncresolver, "Resolver", lambda configure: config)
    pod = "fleet-0.fleet.ns.svc.cluster.local"
    names.put("_grpc._tcp.fleet.ns.svc.cluster.local", "SRV", [f"0 10 9 {pod}."])
    names.put(pod, "A", ["10.0.0.1"])
    told = Told("dns:///fleet:9")
    assert await told.look() == ["fleet-0=10.0.0.1:9"]
    assert told.endpoints[0].tls_name == "fleet-0.fleet"
    assert names.asked[0] == ("_grpc._tcp.fleet.ns.svc.cluster.local", "SRV")


async def test_more_than_a_datagram_holds_comes_over_tcp(names: NameServer) -> None:
    put_pods(names, *range(100))
    assert len(await Told(names.target(NAME, 1)).look()) == 100
    assert names.over_tcp == 1


@pytest.mark.parametrize("trouble", ["SERVFAIL", "REFUSED", "silent"])
@pytest.mark.parametrize("service", [True, False])
async def test_a_name_server_that_cannot_tell_changes_nothing_and_is_warned_of_once(
    names: NameServer,
    trouble: str,
    service: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dns_source, "TRY_S", 0.05)
    monkeypatch.setattr(dns_source, "LIFETIME_S", 0.1)
    names.put(NAME, "A", ["10.0.0.1"])
    if service:
        put_pods(names, 1)
    told = Told(names.target(NAME, 50061))
    known = await told.look()
    names.is_silent, names.rcode = trouble == "silent", "" if trouble == "silent" else trouble
    with caplog.at_level(logging.WARNING):
        assert [await told.look() for _ in range(3)] == [known] * 3
    assert len(caplog.records) == 1 and "keeping the 1 executors it had" in caplog.text
    assert len(told.failed) == 3 and len(told.settled) == 1
    names.is_silent, names.rcode = False, ""
    names.put(NAME, "A", ["10.0.0.5"])
    put_pods(names, *([5] if service else []))
    assert await told.look() != known


async def test_addresses_are_found_where_a_name_server_cannot_tell_srv_records(names: NameServer) -> None:
    told = Told(names.target(NAME, 50061))
    names.unable = frozenset({"SRV"})
    assert await told.look() == []
    assert len(told.failed) == 1  # That there is nothing is not known.
    names.put(NAME, "A", ["10.0.0.7"])
    assert await told.look() == ["10.0.0.7:50061"]
    names.unable = frozenset()
    put_pods(names, 1)
    assert await told.look() == ["pod-1=10.0.0.1:50061"]
    names.unable = frozenset({"SRV"})
    assert await told.look() == ["pod-1=10.0.0.1:50061"]  # They keep their names.
    assert len(told.failed) == 2


async def test_only_a_part_of_an_answer_is_none(names: NameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of one pod cannot be told: nobody leaves for it."""
    monkeypatch.setattr(dns_source, "LIFETIME_S", 0.3)
    names.brings_addresses = False
    put_pods(names, 0, 1)
    told = Told(names.target(NAME, 1))
    known = await told.look()
    real = names.answer
    names.answer = lambda data, size: real(data, size)[: 40 if b"pod-1" in data else None]  # type: ignore[method-assign]
    put_pods(names, 0, 1, 2)
    assert await told.look() == known and len(told.failed) == 1


async def test_a_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "fleet"
    file.write_text("# the fleet\n10.0.0.1:50061 pod-0\n\n[::1]:1 # no name\n")
    told = Told(f"file:{file}")
    assert told.known == ["pod-0=10.0.0.1:50061", "[::1]:1"]
    for broken, why in (
        (b"", "names no executor"),
        (b"10.0.0.1", "line 1: '10.0.0.1' is not host:port"),
        (b"a:1\nb:1 pod extra", "line 2: has more than"),
        (b"a:1\na:1 pod", "line 2: a:1 is in line 1"),
        (b"a:1 pod\nb:1 pod", "line 2: pod is in line 1"),
        (b"a:1 p:1", "'p:1' is no name"),
        (b"\xff\xfe", "no text in UTF-8"),
        (b"".join(b"h%d:1\n" % number for number in range(MAX_FOUND + 1)), "more than"),
        (b"#" * (5 << 20), "larger than 4 MiB"),
    ):
        file.write_bytes(broken)
        caplog.clear()
        assert [await told.look(), await told.look()] == [["pod-0=10.0.0.1:50061", "[::1]:1"]] * 2
        assert len([record for record in caplog.records if why in record.getMessage()]) == 1, why
        with pytest.raises(DiscoveryError, match=why):
            Told(f"file:{file}")
    file.unlink()
    assert await told.look() == ["pod-0=10.0.0.1:50061", "[::1]:1"]
    file.write_text("10.0.0.2:50061 pod-0")
    assert await told.look() == ["pod-0=10.0.0.2:50061"]
    with pytest.raises(DiscoveryError, match="No such file"):
        Told(f"file:{tmp_path / 'nothing'}")


def test_a_name_needs_dnspython(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dns.asyncresolver", None)
    with pytest.raises(DiscoveryError, match=r"pip install 'lorafleet\[scheduler\]'"):
        Told("dns:///fleet:1")
