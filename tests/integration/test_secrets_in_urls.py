"""Whatever is wrong with a store's url, no error and no log has a part of its user or its password."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from adapter_store import InvalidRef, StoreUnavailable, open_store
from adapter_store.redis_store.url import RedisUrl
from lorafleet.cli import main as cli_main
from tests.support.stores.redis_server import RedisServer

ROOT = Path(__file__).parents[2]
PIECES = ("zq7", "xk8", "jv4", "wg9")  # of logins; no text of ours has them
_SPECIAL = st.text("#/?@[]:%,;&=+. \\\"'\n\t\0é℀\udcff09", max_size=3)
_LOGINS = st.tuples(*[_SPECIAL] * 5).map(
    lambda texts: texts[0] + "".join(map("".join, zip(PIECES, texts[1:], strict=True)))
)
_FORMS = st.sampled_from(
    [
        "redis://{}@127.0.0.1:1",
        "rediss://{}@[::1]:1,127.0.0.1:1/3?namespace=x",
        "redis://{}@",
        "redis://{}@h:port/0",
        "redis://{}@h?replicas=-1",
        "redis://h?password={}",
        "redis://h?password_file={}",
        "redis://:{}",
        "redis://u:{}/0",
        "redis:{}@h",
        "redis:/{}@h",
        "redis//{}@h",
        "Redis://{}@h",
        " redis://{}@h",
        "http://{}@h",
        "u{}@h",
    ]
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def shown(text: str) -> list[str]:
    return [piece for piece in PIECES if piece in text.casefold()]


@given(form=_FORMS, login=_LOGINS)
@example(form="redis://{}@h", login="zq7:xk8#jv4")
@example(form="redis://{}@h", login="zq7:xk8[jv4")
@example(form="redis://{}@h", login="zq7:xk8/jv4")
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_random_logins_in_broken_urls(form: str, login: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "@" not in form:
        login = login.replace("@", "")  # what follows it would be the host, and nobody could tell
    url = form.format(login)
    try:
        parsed = RedisUrl.parse(url)
    except InvalidRef as error:
        assert not shown(str(error)) and (error.__suppress_context__ or error.__context__ is None)
    else:
        assert not shown(str(parsed) + repr(parsed))
        return
    capsys.readouterr()
    assert cli_main(["adapters", "migrate", "--model", "none", "--", url, "there"]) == 1
    told = capsys.readouterr()
    assert not shown(told.out + told.err) and told.err.startswith("error: migrate: store url: "), told.err


def test_a_refused_login_is_told_without_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with RedisServer(tmp_path / "server") as server:
        with server.client() as client:
            client.config_set("requirepass", "other")
        address = server.url.removeprefix("redis://")
        for login in ("zq7:xk8", ":xk8"):
            with pytest.raises(StoreUnavailable) as error:
                open_store(f"redis://{login}@{address}")
            assert not shown(str(error.value) + caplog.text), caplog.text


URL = "redis://zq7:xk8/jv4@h"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("executor", "--model", "none", "--store", URL), "store url"),
        (("executor", "--model", "none", f"--stroe={URL}"), "--stroe"),
        (("scheduler", "--model", "none", f"--stroe={URL}"), "--stroe"),
        (("scheduler", "--model", "none", "--store", "redis://zq7:", "xk8@h"), "1 without a flag"),
        (("lorafleet", "adapters", "migrate", "--model", "none", "redis://zq7:", "xk8@h", URL), "1 without"),
    ],
)
def test_services_end_with_one_line(arguments: tuple[str, ...], named: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 2 and named in ended.stderr
    assert not shown(ended.stdout + ended.stderr) and "Traceback" not in ended.stderr, ended.stderr
