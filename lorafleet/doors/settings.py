"""The settings of a service: flag > LORAFLEET_<SERVICE>_<NAME> > TOML file (--config) > default."""

import argparse
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

Config = TypeVar("Config")
REQUIRED = MISSING
# Kubernetes sets LORAFLEET_EXECUTOR_PORT and the like when a Service is called lorafleet-executor.
_SERVICE_LINK = re.compile(r"(SERVICE_HOST|SERVICE_PORT|PORT)(_.*)?")
_WORD = re.compile(r"--?[a-z][a-z0-9-]*")
_METAVARS: Mapping[Any, str] = {int: "N", float: "SECONDS", bool: "BOOL"}
_KINDS = {str: "a text", int: "an integer", float: "a number", bool: "true or false", tuple: "a list"}


class ConfigError(Exception):
    """A setting is missing, unknown or cannot be used; the text names it."""


def setting(
    default: Any,
    text: str,
    metavar: str = "",
    *,
    words: Mapping[str, Any] | None = None,
    repeats: bool = False,
) -> Any:
    """A field of a dataclass of settings. `words` stand for values that are no words; the flag of a list that
    `repeats` may come several times."""
    told = {"help": text, "metavar": metavar, "words": words or {}, "repeats": repeats}
    return field(default=default, metadata=told)


def load(
    kind: Callable[..., Config],
    service: str,
    description: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
) -> Config:
    """The settings of this process, as `kind`, a dataclass whose fields are made by `setting`.

    `--help` prints and exits as argparse does; ConfigError is raised for everything else.
    """
    options = {option.name: option for option in fields(cast(Any, kind))}
    prefix = f"LORAFLEET_{service.upper()}_"
    parser = _parser(options, service, description, prefix)
    flags = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    file = flags.pop("config", None) or environment.get(f"{prefix}CONFIG")
    given = [
        *(_from_file(Path(file)) if file else ()),
        *_from_environment(environment, prefix),
        *((name, value, _flag(name)) for name, value in flags.items()),
    ]
    values = {}
    for written, value, source in given:
        option = options.get(name := written.replace("-", "_"))
        if option is None:
            raise ConfigError(f"{source}: there is no setting {written!r}")
        values[name] = _convert(value, option, source)
    for name, option in options.items():
        if name not in values and option.default is MISSING:
            raise ConfigError(f"{name}: is missing; give {_flag(name)} or {prefix}{name.upper()}")
    return kind(**values)


def _parser(
    options: Mapping[str, Field[Any]], service: str, description: str, prefix: str
) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"python -m {service}",
        description=description,
        epilog=f"Each setting can also come from {prefix}<NAME> or a TOML file; flags win.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings, named as the flags")
    for name, option in options.items():
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if option.type is bool else {}
        parser.add_argument(
            _flag(name),
            action="append" if option.metadata["repeats"] else "store",
            help=option.metadata["help"] + _shown(option.default),
            metavar=option.metadata["metavar"] or _METAVARS.get(option.type, "VALUE"),
            **switch,
        )
    return parser


class QuietParser(argparse.ArgumentParser):
    """Does not quote what it does not know: it may be a piece of a password."""

    def parse_args(  # type: ignore[override]  # of argparse's overloads this has the one that we call
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        """Parses as argparse does, but unknown flags are named without their values, and unknown values only
        counted: a store's url with a space, or after a misspelt flag, would be printed with its password."""
        known: argparse.Namespace
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            names = [word.partition("=")[0] for word in unknown]
            flags = [name for name in names if _WORD.fullmatch(name)]
            others = len(unknown) - len(flags)
            told = [*flags, *([f"{others} without a flag"] if others else [])]
            self.error(f"unrecognized arguments: {', '.join(told)} (values are not shown)")
        return known


class _Parser(QuietParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _shown(default: Any) -> str:
    if default in (MISSING, None, ""):
        return ""
    if isinstance(default, tuple):
        return f" [{','.join(default)}]"
    return f" [{str(default).lower() if isinstance(default, bool) else default}]"


_Given = list[tuple[str, Any, str]]
"""A setting's name as it was written, its value, and what to name where it cannot be used."""


def _from_file(path: Path) -> _Given:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"config: {path} cannot be read: {error}") from error
    return [(name, value, str(path)) for name, value in content.items()]


def _from_environment(environment: Mapping[str, str], prefix: str) -> _Given:
    found = [(key, key.removeprefix(prefix)) for key in environment if key.startswith(prefix)]
    return [
        (name.lower(), environment[key], key)
        for key, name in found
        if name not in ("", "CONFIG") and not _SERVICE_LINK.fullmatch(name)
    ]


def _convert(value: Any, option: Field[Any], source: str) -> Any:
    """A text, or a TOML value, as the setting's type."""
    words, kind = option.metadata["words"], _kind(option)
    try:
        if isinstance(value, str) and value.lower() in words:
            return words[value.lower()]
        if kind is bool:
            return {"true": True, "false": False}[str(value).lower()]
        if kind is tuple:
            return _parts(value)
        if isinstance(value, str) or type(value) is kind or (kind is float and type(value) is int):
            return kind(value)
    except (ValueError, KeyError, TypeError):
        pass
    wanted = " or ".join((_KINDS.get(kind, "a path"), *words))
    raise ConfigError(f"{source}: {option.name} cannot be {value!r}, it is {wanted}")


def _kind(option: Field[Any]) -> Any:
    if option.type in (Path, Path | None):
        return Path
    return tuple if option.type == tuple[str, ...] else option.type


def _parts(value: Any) -> tuple[str, ...]:
    """The parts of a text with commas, or of a list of such texts."""
    texts = [value] if isinstance(value, str) else value
    return tuple(part.strip() for text in texts for part in str.split(text, ",") if part.strip())
