"""Typed reading of a JSON object, with errors that name the file and the field."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from adapter_store.errors import InvalidModel
from adapter_store.files.lfs_pointer import WHAT_IT_IS, is_pointer_file

_REQUIRED = object()


@dataclass(frozen=True, slots=True)
class Fields:
    """A missing field or null takes the default; without a default it is an error. All raise InvalidModel."""

    values: Mapping[str, Any]
    origin: str  # for messages: the file, and the path within it

    @classmethod
    def from_file(cls, path: Path) -> Self:
        try:
            if is_pointer_file(path):
                raise ValueError(f"it is {WHAT_IT_IS}")
            values = json.loads(path.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidModel(f"cannot read {path}: {error}") from error
        if not isinstance(values, dict):
            raise InvalidModel(f"{path} holds no JSON object")
        return cls(values, str(path))

    @classmethod
    def from_file_if_there(cls, path: Path) -> Self:
        """Without the file, an object without fields."""
        return cls.from_file(path) if path.exists() else cls({}, str(path))

    def integer(self, name: str) -> int:
        value = self._get(name, _REQUIRED)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(name, "a positive integer")
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self.values.get(name) is None else self.integer(name)

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(name, "a number")
        return float(value)

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str) -> str:
        value = self._get(name, _REQUIRED)
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """A token id, a list of them, or nothing."""
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.wrong(name, "token ids")
        return tuple(ids)

    def wrong(self, name: str, wanted: str) -> InvalidModel:
        """What to raise when the field is something else than it must be."""
        return InvalidModel(f"{self.origin}: {name} must be {wanted}, not {self.values.get(name)!r}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise InvalidModel(f"{self.origin}: {name} is missing")
        return default
