"""Typed reading of a JSON object, with errors that name the file and the field."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from executor.errors import BadCheckpoint, UnsupportedModel

_REQUIRED = object()


@dataclass(frozen=True, slots=True)
class Fields:
    """A missing field or null takes the default; without a default it is an error."""

    values: Mapping[str, Any]
    origin: str  # for messages: the file, and the path within it

    @classmethod
    def from_file(cls, path: Path) -> Self:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BadCheckpoint(f"cannot read {path}: {error}") from error
        if not isinstance(values, dict):
            raise BadCheckpoint(f"{path} holds no JSON object")
        return cls(values, str(path))

    def integer(self, name: str, default: Any = _REQUIRED) -> int:
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._wrong(name, value, "a positive integer")
        return value

    def optional_integer(self, name: str, default: int | None) -> int | None:
        """Here an explicit null means None, whatever the default."""
        return None if self.values.get(name, default) is None else self.integer(name, default)

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(name, value, "a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """A token id, a list of them, or nothing."""
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self._wrong(name, value, "token ids")
        return tuple(ids)

    def refuse(self, name: str, why: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.origin}: {name} = {self.values.get(name)!r} is not supported: {why}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise BadCheckpoint(f"{self.origin}: {name} is missing")
        return default

    def _wrong(self, name: str, value: object, wanted: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self.origin}: {name} must be {wanted}, not {value!r}")
