"""Both services take their settings and write their logs in the same way."""

import json
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest

from executor.config import ExecutorConfig
from executor.config import load_config as load_executor
from lorafleet.doors.settings import ConfigError
from scheduler.config import Config
from scheduler.config import load_config as load_scheduler

NEEDED = ["--model", "m", "--store", "s"]


class Load(Protocol):
    def __call__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Any: ...


class Service(NamedTuple):
    name: str
    load: Load
    kind: Any
    needed: list[str]


SERVICES = [
    Service("scheduler", load_scheduler, Config, [*NEEDED, "--executor", "e:1"]),
    Service("executor", load_executor, ExecutorConfig, NEEDED),
]


@pytest.fixture(params=SERVICES, ids=lambda service: service.name)
def service(request: pytest.FixtureRequest) -> Service:
    found: Service = request.param
    return found


@pytest.mark.parametrize("name", ["keepalive-time", "keepalive_time"])
def test_a_file_names_settings_with_dashes_or_underscores(
    service: Service, tmp_path: Path, name: str
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f"{name} = 7\ninsecure = true\n")
    config = service.load([*service.needed, "--config", str(file)], {})
    assert (config.keepalive_time, type(config.keepalive_time), config.insecure) == (7.0, float, True)


@pytest.mark.parametrize("name", ["KEEPALIVE_TIME", "keepalive_time"])
def test_the_environment_may_be_in_capitals_or_not(service: Service, name: str) -> None:
    environment = {f"LORAFLEET_{service.name.upper()}_{name}": "7.5"}
    assert service.load(service.needed, environment).keepalive_time == 7.5


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("keepalive = 7", "settings.toml: there is no setting 'keepalive'"),
        ("metrics-port = true", "settings.toml: metrics_port cannot be True, it is an integer"),
        ("metrics-port = 1.5", "settings.toml: metrics_port cannot be 1.5, it is an integer"),
        ("listen = 3", "settings.toml: listen cannot be 3, it is a text"),
        ("insecure = 1", "settings.toml: insecure cannot be 1, it is true or false"),
    ],
)
def test_what_cannot_be_used_is_told_in_the_same_words(
    service: Service, tmp_path: Path, line: str, text: str
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(line)
    with pytest.raises(ConfigError, match=text):
        service.load([*service.needed, "--config", str(file)], {})


def test_help_names_every_setting_and_its_default(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        service.load(["--help"], {})
    text = capsys.readouterr().out
    assert all("--" + setting.name.replace("_", "-") in text for setting in fields(service.kind))
    assert "[info]" in text and "[20.0]" in text and "[false]" in text


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_log_line_has_every_field_that_it_is_given(log_format: str) -> None:
    """One module sets up both; it is asked in a process of its own, since it takes the whole process."""
    program = (
        "import logging; from lorafleet.doors.logs import set_up; "
        f"set_up({log_format!r}, 'info'); "
        "logging.getLogger('executor').info('ended', extra={'digest': 'd\\n', 'tokens': 3})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    (line,) = done.stderr.splitlines()
    if log_format == "json":
        entry = json.loads(line)
        assert (entry["message"], entry["level"], entry["digest"], entry["tokens"]) == (
            "ended",
            "info",
            "d\n",
            3,
        )
    else:
        assert line.endswith(f"{logging.getLevelName(logging.INFO):7} executor: ended digest='d\\n' tokens=3")
