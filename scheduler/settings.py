"""Where settings come from: flag > LORAFLEET_SCHEDULER_<NAME> > TOML file (--config) > default."""

import argparse
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, NoReturn

from lorafleet.commands.parsing import QuietParser
from scheduler.config import Config, ConfigError

_METAVARS: Mapping[Any, str] = {int: "N", float: "SECONDS"}
ENVIRONMENT_PREFIX = "LORAFLEET_SCHEDULER_"
# What Kubernetes sets for a Service named lorafleet-scheduler; not ours to refuse.
_KUBERNETES = re.compile(r"SERVICE_(HOST|PORT(_.*)?)|PORT(_.*)?")


def load(arguments: Sequence[str], environment: Mapping[str, str]) -> Config:
    """The settings of this process. `--help` prints and exits; ConfigError for everything else."""
    options = {option.name: option for option in fields(Config)}
    flags = {
        name: value for name, value in vars(_parser().parse_args(arguments)).items() if value is not None
    }
    config_file = flags.pop("config", None) or environment.get(f"{ENVIRONMENT_PREFIX}CONFIG")
    values = {**_from_file(config_file, options), **_from_environment(environment, options), **flags}
    for name, option in options.items():
        if name not in values and option.default is MISSING:
            raise ConfigError(f"{name}: is missing; give {_flag(name)} or {ENVIRONMENT_PREFIX}{name.upper()}")
    return Config(**{name: _convert(value, options[name]) for name, value in values.items()})


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m scheduler",
        description="Takes requests over gRPC, groups them by adapter and sends them to executors.",
        epilog=f"Every option can also be set as {ENVIRONMENT_PREFIX}<NAME> or in the file of --config; "
        "a flag goes before the environment, and that before the file.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", help="TOML file with any of these settings", metavar="FILE")
    for option in fields(Config):
        default = option.default
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if option.type is bool else {}
        default_text = "" if default in (MISSING, None) else f" (default: {default})"
        parser.add_argument(
            _flag(option.name),
            dest=option.name,
            action="append" if option.name == "executor" else "store",
            help=option.metadata["help"] + default_text,
            metavar=option.metadata["metavar"] or _METAVARS.get(option.type, "NAME"),
            **switch,
        )
    return parser


class _Parser(QuietParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _from_file(path: str | None, options: Mapping[str, Field[Any]]) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"config: {path}: {error}") from error
    if unknown := sorted(content.keys() - options.keys()):
        raise ConfigError(f"config: {path}: unknown key {unknown[0]!r}")
    return content


def _from_environment(environment: Mapping[str, str], options: Mapping[str, Field[Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in environment.items():
        name = key.removeprefix(ENVIRONMENT_PREFIX)
        if name == key or name == "CONFIG" or _KUBERNETES.fullmatch(name):
            continue
        if name.lower() not in options or not name.isupper():
            raise ConfigError(f"unknown environment variable {key}")
        values[name.lower()] = value.split(",") if name == "EXECUTOR" else value
    return values


def _convert(value: Any, option: Field[Any]) -> Any:
    if option.name == "executor":
        addresses = [value] if isinstance(value, str) else value
        if not isinstance(addresses, list) or not all(isinstance(item, str) for item in addresses):
            raise ConfigError("executor: needs a list of host:port")
        return tuple(address.strip() for address in addresses if address.strip())
    if option.type in (Path, Path | None):
        return Path(str(value))
    if option.type is bool:
        return _boolean(value, option.name)
    convert: type = option.type if isinstance(option.type, type) else str
    if isinstance(value, bool) or (convert is int and isinstance(value, float)):
        raise ConfigError(f"{option.name}: {value!r} is not of type {convert.__name__}")
    try:
        return convert(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{option.name}: {value!r} is not of type {convert.__name__}") from None


def _boolean(value: Any, name: str) -> bool:
    if str(value).lower() not in ("true", "false"):
        raise ConfigError(f"{name}: {value!r} is neither true nor false")
    return str(value).lower() == "true"
