from pathlib import Path

import pytest

from adapter_store import InvalidRef, open_store
from adapter_store.redis_store.url import Node, RedisUrl


def test_everything_a_url_can_say(tmp_path: Path) -> None:
    url = RedisUrl.parse(
        "rediss://fleet:p%40ss@a.example:7000,[::1],b.example/3?namespace=eu-1&replicas=1&timeout=5"
        "&allow_volatile=1&ca_file=/ca.pem&cert_file=/c.pem&key_file=/k.pem"
    )
    assert url == RedisUrl(
        nodes=(Node("a.example", 7000), Node("::1", 6379), Node("b.example", 6379)),
        tls=True,
        username="fleet",
        password="p@ss",
        db=3,
        namespace="eu-1",
        allow_volatile=True,
        replicas=1,
        timeout=5,
        ca_file="/ca.pem",
        cert_file="/c.pem",
        key_file="/k.pem",
    )
    assert str(url) == "rediss://a.example:7000,[::1]:6379,b.example:6379/3"
    assert "p@ss" not in repr(url)


def test_what_a_url_leaves_out() -> None:
    assert RedisUrl.parse("redis://localhost") == RedisUrl((Node("localhost", 6379),))
    assert RedisUrl.parse("redis://localhost", allow_volatile=True).allow_volatile
    assert RedisUrl.parse("redis://:secret@localhost").password == "secret"


def test_a_password_may_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("p@ss\n")
    assert RedisUrl.parse(f"redis://fleet@h?password_file={tmp_path / 'secret'}").password == "p@ss"
    with pytest.raises(InvalidRef, match="password_file"):
        RedisUrl.parse(f"redis://fleet@h?password_file={tmp_path / 'none'}")


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("redis://u:hunter2@", "host"),
        ("redis://u:hunter2@h:port", "host:port"),
        ("redis://u:hunter2@h:99999", "host:port"),
        ("redis://u:hunter2@h/zero", "database"),
        ("redis://u:hunter2@h?replicas=-1", "replicas"),
        ("redis://u:hunter2@h?timeout=soon", "timeout"),
        ("redis://u:hunter2@h?timeout=0", "timeout"),
        ("redis://u:hunter2@h?allow_volatile=perhaps", "allow_volatile"),
        ("redis://u:hunter2@h?namespace={x}", "namespace"),
        ("redis://u:hunter2@h?ssl_cert_reqs=none", "ssl_cert_reqs"),
        ("redis+x://u:hunter2@h", "store url"),
    ],
)
def test_errors_name_the_part_and_no_secret(url: str, part: str) -> None:
    with pytest.raises(InvalidRef, match=part) as error:
        open_store(url)
    assert "hunter2" not in str(error.value)
