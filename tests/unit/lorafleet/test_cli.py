import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from lorafleet import cli, errors
from lorafleet.commands import generate


def every_parser(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child, sub in action.choices.items():
                yield from every_parser(sub, f"{name} {child}")


PARSERS = dict(every_parser(cli.parser(), "lorafleet"))
COMMANDS = {name: parser for name, parser in PARSERS.items() if parser.get_default("run")}


def test_the_commands_are_those_that_users_were_told_of() -> None:
    assert {name.removeprefix("lorafleet ") for name in COMMANDS} == {
        "demo",
        "certs",
        "serve",
        "generate",
        "chat",
        "models",
        "top",
        "plan",
        "adapters push",
        "adapters push-all",
        "adapters list",
        "adapters show",
        "adapters diff",
        "adapters verify",
        "adapters export",
        "adapters rm",
        "adapters protect",
        "adapters unprotect",
        "adapters pin",
        "adapters unpin",
        "adapters drop",
        "adapters drain",
        "adapters activate",
        "adapters rm-damaged",
        "adapters gc",
        "adapters residency",
        "adapters migrate",
        "adapters alias list",
        "adapters alias set",
        "adapters alias rm",
        "executors cordon",
        "executors uncordon",
        "executors drain",
        "bench load",
        "bench preset",
        "bench compare",
        "bench plot",
        "bench make-adapters",
        "bench shapes",
        "usage",
    }


@pytest.mark.parametrize("name", PARSERS)
def test_every_help_describes_and_every_command_has_examples(name: str) -> None:
    text = PARSERS[name].format_help()
    assert PARSERS[name].description
    assert all(action.help for action in PARSERS[name]._actions if action.required and action.option_strings)
    if name in COMMANDS:
        assert f"  {name} " in text.partition("examples:")[2] or text.rstrip().endswith(name)


@pytest.mark.parametrize("name", [n for n in COMMANDS if n.startswith("lorafleet adapters")])
def test_every_adapters_command_takes_json(name: str) -> None:
    assert "--json" in COMMANDS[name].format_help()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["adapters", "list", "--limit", "-1"], "'-1' is no whole number above 0"),
        (["adapters", "list", "--larger", "big"], "'big' is no size; write it as 100MB"),
        (["adapters", "alias", "set", "x@p", "v1=half"], "'half' is no whole number above 0"),
        (["models", "--timeout", "0"], "'0' is no number of seconds above 0"),
        (["top", "--interval", "nan"], "'nan' is no number of seconds above 0"),
        (["serve", "--model", "m", "--store", "s", "--port", "99999"], "'99999' is no port: 0 to 65535"),
        (["serve", "--model", "m", "--store", "s", "--executor-args", "'"], "cannot be split into words"),
        (["bench", "load", "--requests", "0"], "'0' is no whole number above 0"),
    ],
)
def test_values_that_no_option_takes_are_told_in_words(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == cli.USAGE
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_system_message_makes_a_conversation() -> None:
    args = cli.parser().parse_args(["generate", "hi", "--system", "Be brief."])
    assert generate._prompt(args) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]
    assert generate._prompt(cli.parser().parse_args(["generate", "hi"])) == "hi"


def test_wrong_usage_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["adapters"], ["generate", "--top-k", "x"], ["serve"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(argv)
        assert caught.value.code == cli.USAGE
    assert "Traceback" not in capsys.readouterr().err


def failing(error: BaseException) -> argparse.Namespace:
    def run(args: argparse.Namespace) -> int:
        raise error

    return argparse.Namespace(run=run, target="host:1")


Code = grpc.StatusCode
CASES = [
    (
        errors.Unavailable(Code.UNAVAILABLE, "errors resolving x: [field:lookup failed: Domain not found]"),
        "error: cannot reach a scheduler at host:1 (Domain not found);",
        1,
    ),
    (
        errors.Unavailable(Code.UNAVAILABLE, "failed: ipv4:127.0.0.1:1: Tls handshake failed: context: OK"),
        "error: cannot reach a scheduler at host:1 (no TLS connection came about);",
        1,
    ),
    (
        errors.Unavailable(Code.UNAVAILABLE, "refused"),
        "error: cannot reach a scheduler at host:1 (refused)",
        1,
    ),
    (errors.Unavailable(Code.UNAVAILABLE, "draining", reason="DRAINING"), "error: draining", 1),
    (
        errors.Unavailable(Code.UNAVAILABLE, "none is ready", reason="NO_EXECUTOR", retry_after=1),
        "error: none is ready; `lorafleet top --once` tells why",
        1,
    ),
    (
        errors.QueueFull(Code.RESOURCE_EXHAUSTED, "full", retry_after=2.5),
        "error: full; try again in 2.5 s",
        1,
    ),
    (
        errors.DeadlineExceeded(Code.DEADLINE_EXCEEDED, "it would be late", retry_after=4.5),
        "error: it would be late; --timeout allows more, or try again in 4.5 s",
        1,
    ),
    (errors.Unauthenticated(Code.UNAUTHENTICATED, "no token"), "error: no token; set LORAFLEET_TOKEN", 1),
    (errors.InvalidRequest(Code.INVALID_ARGUMENT, "top_p:\n  bad"), "error: top_p: bad", 1),
    (
        errors.ServiceEnded("executor-0", 3, "no such model"),
        "error: executor-0 ended with status 3: no such",
        3,
    ),
    (
        errors.ServiceEnded("executor-0", -9, ""),
        "error: executor-0 ended with status 137: it logged nothing",
        137,
    ),
    (errors.LaunchError("port in use"), "error: port in use", 1),
    (FileNotFoundError(2, "No such file", "x.pem"), "error: x.pem: No such file", 1),
    (KeyboardInterrupt(), "interrupted", 130),
]


@pytest.mark.parametrize(("error", "line", "status"), CASES)
def test_every_failure_is_one_line(
    error: BaseException,
    line: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = argparse.ArgumentParser()
    monkeypatch.setattr(parser, "parse_args", lambda argv: failing(error))
    monkeypatch.setattr(cli, "parser", lambda: parser)
    assert cli.main([]) == status
    (printed,) = capsys.readouterr().err.splitlines()
    assert printed.startswith(line)


def command(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lorafleet", *args],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **env},
    )


def test_a_wrong_port_is_one_clear_line() -> None:
    done = command("models", LORAFLEET_TARGET="127.0.0.1:1")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and "127.0.0.1:1" in line and "--target" in line


def test_serving_no_model_is_one_clear_line(tmp_path: Path) -> None:
    done = command("serve", "--model", str(tmp_path), "--store", str(tmp_path / "store"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: {tmp_path} is no model folder: it has no config.json\n"


def test_a_token_that_no_header_can_carry_is_one_clear_line() -> None:
    done = command("models", LORAFLEET_TARGET="127.0.0.1:1", LORAFLEET_TOKEN="secret\n")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: token: holds what no header can carry")
