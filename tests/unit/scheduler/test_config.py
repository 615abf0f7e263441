from pathlib import Path

import pytest

from lorafleet.doors.settings import ConfigError
from lorafleet.tls.files import Tls
from scheduler.config import Config
from scheduler.config import load_config as load

REQUIRED = ["--model", "m", "--store", "s", "--executor", "e:1"]


def test_defaults() -> None:
    config = load(REQUIRED, {})
    assert config == Config(model=Path("m"), store="s", executor=("e:1",))
    assert (config.listen, config.metrics_port) == ("127.0.0.1:50051", 9400)


def test_flag_before_environment_before_file_before_default(tmp_path: Path) -> None:
    file = tmp_path / "scheduler.toml"
    file.write_text(
        'model = "file"\nmax_queued = 1\naging = 1\nexecutor = ["a:1", "b:2"]\nlog_level = "debug"\n'
    )
    environment = {
        "LORAFLEET_SCHEDULER_CONFIG": str(file),
        "LORAFLEET_SCHEDULER_STORE": "env",
        "LORAFLEET_SCHEDULER_MAX_QUEUED": "2",
        "LORAFLEET_SCHEDULER_AGING": "2.5",
        "UNRELATED": "x",
    }
    config = load(["--max-queued", "3"], environment)
    assert (config.model, config.store) == (Path("file"), "env")
    assert (config.max_queued, config.aging, config.max_attempts) == (3, 2.5, 3)
    assert (config.executor, config.log_level) == (("a:1", "b:2"), "debug")


def test_executors_are_repeated_or_listed() -> None:
    assert load([*REQUIRED, "--executor", "f:2"], {}).executor == ("e:1", "f:2")
    environment = {"LORAFLEET_SCHEDULER_EXECUTOR": "e:1, f:2"}
    assert load(REQUIRED[:4], environment).executor == ("e:1", "f:2")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--max-queued", "many"], "max_queued cannot be 'many', it is an integer"),
        (["--max-queued", "0"], "max_queued: must be above 0"),
        (["--step-timeout", "0"], "step_timeout: must be above 0"),
        (["--report-timeout", "nan"], "report_timeout: must be above 0"),
        (["--aging", "-1"], "aging: must not be negative"),
        (["--max-queue-time", "-1"], "max_queue_time: must not be negative"),
        (["--aging", "nan"], "aging: must not be negative"),
        (["--scale-seats-filled", "1.1"], "scale_seats_filled: must not be above 1"),
        (["--scale-start-within", "0"], "scale_start_within: must be above 0"),
        (["--executor", "nohost"], "executor: 'nohost' is not host:port"),
        (["--executor", "e:1"], "executor: an address is named twice"),
        (["--executor", "dns:fleet:1"], "executor: 'dns:fleet:1' is not dns:///name:port"),
        (["--executor", "[::1]:0"], "executor: '[::1]:0': port 0 is not in"),
        (["--discovery-interval", "0"], "discovery_interval: must be above 0"),
        (["--listen", "127.0.0.1:x"], "listen: '127.0.0.1:x' is not host:port"),
        (["--listen", "127.0.0.1:70000"], "listen: '127.0.0.1:70000' is not host:port"),
        (["--metrics-port", "-2"], "metrics_port: -2"),
        (["--log-format", "xml"], "log_format: 'xml'"),
        (["--log-level", "loud"], "log_level: 'loud'"),
        (["--config", "/does/not/exist"], "config: /does/not/exist"),
    ],
)
def test_what_is_wrong_is_named(flags: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([*REQUIRED, *flags], {})
    assert text in str(caught.value)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="model: is missing; give --model or LORAFLEET_SCHEDULER_MODEL"):
        load([], {})


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "[::]", "example.org"])
def test_beyond_loopback_there_are_tokens_and_tls(host: str) -> None:
    listen = [*REQUIRED, "--listen", f"{host}:1"]
    tokens, tls = ["--tokens-file", "t"], ["--tls-cert-file", "c", "--tls-key-file", "k"]
    for flags, missing in (
        ([], "set --tokens-file or --jwt-keys-file, --tls-cert-file, --tls-key-file "),
        (tokens, "set --tls-cert-file, --tls-key-file "),
        (tls, "set --tokens-file or --jwt-keys-file "),
    ):
        with pytest.raises(ConfigError, match=missing):
            load([*listen, *flags], {})
        assert missing in load([*listen, *flags, "--insecure"], {}).open_door
    config = load([*listen, *tokens, *tls], {})
    assert config.open_door == "" and config.tls == Tls(cert=Path("c"), key=Path("k"))


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--tls-cert-file", "c"], "--tls-cert-file and --tls-key-file go together"),
        (["--executor-key-file", "k"], "--executor-cert-file and --executor-key-file go together"),
        (["--tls-client-ca-file", "ca"], "--tls-client-ca-file: needs --tls-cert-file"),
        (["--executor-cert-file", "c", "--executor-key-file", "k"], "needs --executor-ca-file"),
        (["--health-port", "-2"], "health_port: -2"),
    ],
)
def test_half_a_lock_is_refused(flags: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load([*REQUIRED, *flags], {})


def test_executors_are_reached_over_tls_as_soon_as_their_ca_is_named() -> None:
    assert load(REQUIRED, {}).executor_tls is None
    files = ["--executor-ca-file", "ca", "--executor-cert-file", "c", "--executor-key-file", "k"]
    assert load([*REQUIRED, *files], {}).executor_tls == Tls(ca=Path("ca"), cert=Path("c"), key=Path("k"))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.9.9.9"])
def test_loopback(host: str) -> None:
    assert load([*REQUIRED, "--listen", f"{host}:0"], {}).listen == f"{host}:0"


def test_a_file_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("a = " + "[" * 100_000)
    with pytest.raises(ConfigError, match=r"c\.toml"):
        load([*REQUIRED, "--config", str(file)], {})


def test_unknown_keys_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("max_queue = 3\n")
    with pytest.raises(ConfigError, match="there is no setting 'max_queue'"):
        load([*REQUIRED, "--config", str(file)], {})
    with pytest.raises(ConfigError, match="LORAFLEET_SCHEDULER_MAX_QUEUE"):
        load(REQUIRED, {"LORAFLEET_SCHEDULER_MAX_QUEUE": "3"})
    with pytest.raises(ConfigError, match="--max-queue, 1 without a flag"):
        load([*REQUIRED, "--max-queue", "3"], {})


def test_what_kubernetes_sets_for_a_service_is_no_setting_of_ours() -> None:
    environment = {
        "LORAFLEET_SCHEDULER_SERVICE_HOST": "10.0.0.1",
        "LORAFLEET_SCHEDULER_SERVICE_PORT_GRPC": "50051",
        "LORAFLEET_SCHEDULER_PORT": "tcp://10.0.0.1:50051",
        "LORAFLEET_SCHEDULER_PORT_50051_TCP_ADDR": "10.0.0.1",
    }
    assert load(REQUIRED, environment) == load(REQUIRED, {})


def test_wrong_types_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    for line in ("max_queued = 1.5", "max_queued = true", "executor = 3"):
        file.write_text(line + "\n")
        with pytest.raises(ConfigError):
            load(
                [*REQUIRED[:4], "--config", str(file)],
                {"LORAFLEET_SCHEDULER_EXECUTOR": "e:1"} if "max" in line else {},
            )


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(["--help"], {})
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name in Config.__dataclass_fields__:
        assert "--" + name.replace("_", "-") in text
