from pathlib import Path

import pytest

from adapter_store import InvalidRef, open_store
from adapter_store.redis_store.url import Node, RedisUrl
from adapter_store.store import folder_of


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
        ("redis://u:hunter2@h?replicas=1&ssl_cert_reqs=none", "option 2"),
        ("redis://u:hunter2@h?hunter2", "option 1"),
        ("redis://u:hunter2@h?password_file=hunter2", "password_file"),
        ("redis+x://u:hunter2@h", "store url"),
        ("hunter2://u:hunter2@h", "store url"),
        ("redis/u:hunter2@h", "store url"),
        ("u:hunter2@h", "store url"),
        ("hunter2@h", "store url"),
        ("redis://u:x#hunter2@h", "has a #.* %23.*password_file"),
        ("redis://u:x/hunter2@h", "first / .*%2F.*password_file"),
        ("redis://u:x?hunter2@h", "first [?] .*%3F.*password_file"),
        ("redis://u:x#hunter2", "has a #"),
        ("redis://u:hunter2", "host:port"),
        ("redis://u:hunter2/0", "host:port"),
        ("redis://u:hunter2%ff@h", "UTF-8"),
        ("redis://u:hunter2\udcff@h", "UTF-8"),
        ("redis://u:hunter2@[::1", "host:port"),
        ("redis://u:hunter2@[hunter2]", "host:port"),
        ("redis://u:hunter2@a..b", "host:port"),
        ("redis://u:hunter2@h\u2100", "host:port"),  # which `urlsplit` refuses, quoting the login
        ("redis://u:hunter2@h:" + "9" * 5000, "host:port"),
        ("redis://u:hunter2@h/" + "9" * 5000, "database"),
    ],
)
def test_errors_name_the_part_and_no_secret(url: str, part: str) -> None:
    with pytest.raises(InvalidRef, match=part) as error:
        open_store(url)
    assert "hunter2" not in str(error.value)
    assert error.value.__cause__ is None, "a traceback would tell more"


@pytest.mark.parametrize("password", ["[a]b:c", "]", "a,b", "p@ss", "50%", "\u2100", "a b", "é"])
def test_characters_that_need_no_percent_in_a_password(password: str) -> None:
    url = RedisUrl.parse(f"redis://u:{password}@h,[::1]:7/1")
    assert (url.username, url.password, url.db) == ("u", password, 1)
    assert url.nodes == (Node("h", 6379), Node("::1", 7))


def test_a_folder_with_an_at_sign(tmp_path: Path) -> None:
    assert folder_of(f"{tmp_path}/a@b") == tmp_path / "a@b"
    assert folder_of("disk:a@b:c") == Path("a@b:c")
