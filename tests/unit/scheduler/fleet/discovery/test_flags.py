from pathlib import Path

import pytest

from scheduler.fleet.discovery.discovery import merged
from scheduler.fleet.discovery.flags import DnsName, File, parse
from scheduler.fleet.endpoint import Endpoint


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("gpu-1:50061", Endpoint("gpu-1:50061")),
        ("10.0.0.7:1", Endpoint("10.0.0.7:1")),
        ("[::1]:50061", Endpoint("[::1]:50061")),
        ("[2001:DB8:0:0::1]:9", Endpoint("[2001:db8::1]:9")),
        ("file:/etc/fleet", File("file:/etc/fleet", Path("/etc/fleet"))),
        ("dns:///fleet.ns:50061", DnsName("dns:///fleet.ns:50061", "fleet.ns", 50061)),
        ("dns://10.0.0.10/fleet:9", DnsName("dns://10.0.0.10/fleet:9", "fleet", 9, ("10.0.0.10", 53))),
        ("dns://[::1]:5353/fleet:9", DnsName("dns://[::1]:5353/fleet:9", "fleet", 9, ("::1", 5353))),
        ("dns:///_grpc._tcp.fleet", DnsName("dns:///_grpc._tcp.fleet", "_grpc._tcp.fleet", 0)),
    ],
)
def test_what_flags_say(flag: str, expected: object) -> None:
    assert parse(flag) == expected


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("nohost", "is not host:port"),
        (":50061", "is not host:port"),
        ("a:0", "port 0 is not in"),
        ("a:70000", "port 70000 is not in"),
        ("a:-1", "is not host:port"),
        ("a:٣", "is not host:port"),
        ("::1:50061", "in brackets"),
        ("[::1:50061", "in brackets"),
        ("[nonsense]:1", "is no IP address"),
        ("300.0.0.1:1", "is no IP address"),
        ("two words:1", "is no name of a host"),
        ("a..b:1", "is no name of a host"),
        ("http://a:1", "in brackets"),
        ("file:", "names no file"),
        ("dns:fleet:1", "is not dns:///name:port"),
        ("dns:///", "is not dns:///name:port"),
        ("dns:///fleet", "is not host:port"),
        ("dns:///a/b:1", "is no name of a host"),
        ("dns://server/fleet:1", "no IP address"),
        ("dns://10.0.0.1:x/fleet:1", "no IP address"),
    ],
)
def test_flags_that_mean_nothing_are_refused_and_quoted(flag: str, told: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse(flag)
    assert told in str(refused.value)


def test_one_executor_an_address_and_one_address_a_name() -> None:
    bare, own = Endpoint("10.0.0.1:1"), Endpoint("10.0.0.1:1", "pod-0")
    assert merged([[bare], [own]]) == [own]
    assert merged([[own], [bare], [Endpoint("10.0.0.1:1", "other")]]) == [own]
    twin = Endpoint("10.0.0.2:1", "pod-0")
    assert merged([[own], [twin]]) == [own, Endpoint("10.0.0.2:1")]
