"""The table of kernels/vllm/README.md has every name of the reference, and says how parameters differ."""

import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.vllm.api import committed, read_api

README = Path(__file__).parents[3] / "kernels" / "vllm" / "README.md"
SECTION, ROW = (
    re.compile(r"### \w+: `vllm\.(.+)` → `(.+)`"),
    re.compile(r"\| `([\w.*]+)` \| (?:`([\w.*]+)`|none) \| (.*)\|"),
)
NAMES = {
    name: (file, parameters) for file, names in committed().items() for name, parameters in names.items()
}


@dataclass(frozen=True)
class Row:
    folder: str
    theirs: str
    ours: str | None
    differs: str


@cache
def rows() -> list[Row]:
    found, folder, base = [], "", ""
    for line in README.read_text().splitlines():
        if section := SECTION.match(line):
            folder, base = section[1].replace(".", "/"), section[2]
        elif row := ROW.match(line):
            found.append(Row(folder, row[1], f"{base}.{row[2]}" if row[2] else None, row[3]))
        else:
            assert not (base and line.startswith("| `")), f"no row of the table: {line}"
    return found


def row_of(name: str) -> Row | None:
    """The name's own line, else its method's for every class, else its class's for whatever else it has."""
    folder = NAMES[name][0].rpartition("/")[0]
    fitting = [row for row in rows() if row.folder == folder and fnmatchcase(name, row.theirs)]
    return min(fitting, key=lambda row: (row.theirs != name, row.theirs.endswith("*")), default=None)


def resolve(path: str) -> Any:
    """What a dotted path names: a module's member, or a member's."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = inspect.getattr_static(found, part) if inspect.isclass(found) else getattr(found, part)
        return found
    raise AssertionError(f"{path} names nothing")


def parameters(ours: Any) -> dict[str, bool]:
    """Of a function or an operation of torch: each parameter, and whether it must be given."""
    if isinstance(ours, torch._ops.OpOverloadPacket):
        ours = ours.default
    ours = getattr(ours, "_opoverload", ours)
    if isinstance(ours, torch._ops.OpOverload):
        return {each.name: not each.has_default_value() for each in ours._schema.arguments}
    called = ours.__func__ if isinstance(ours, classmethod | staticmethod) else ours
    named = inspect.signature(called).parameters.values()
    starred = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {
        f"*{each.name}" if each.kind in starred else each.name: each.default is inspect.Parameter.empty
        and each.kind not in starred
        for each in named
        if each.name not in ("self", "cls")
    }


def differences(theirs: list[str], ours: dict[str, bool]) -> Iterator[str]:
    """Parameters that one has and the other has not, or that stand in another order."""
    yield from (name for name in theirs if name not in ours and name[0] != "*")
    yield from (name for name, needed in ours.items() if needed and name not in theirs)
    if "*kwargs" in theirs and "*args" not in theirs and "*kwargs" not in ours:
        yield "*kwargs"
    common = [name for name in theirs if name in ours and name[0] != "*"]
    # Ours may take more, behind theirs.
    if common != [name for name in ours if name in common]:
        yield "the order"


@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_a_line_that_is_true(name: str) -> None:
    row = row_of(name)
    assert row is not None, "no line of the table names it"
    if row.ours is None:
        assert row.differs.strip(), "what we do not have needs a reason"
        return
    path = row.ours.removesuffix("*") + name.rpartition(".")[2] if row.ours.endswith("*") else row.ours
    ours, expected = resolve(path), NAMES[name][1]
    if inspect.isclass(ours):
        fields = inspect.get_annotations(ours)
        assert all(field in fields for field in expected or ()), f"fields {expected}"
    elif expected is None:
        assert isinstance(ours, property)
    else:
        unsaid = [each for each in differences(expected, parameters(ours)) if f"`{each}`" not in row.differs]
        assert not unsaid, f"the line does not say that these differ: {unsaid}"


def test_no_line_is_of_a_name_that_is_not_there() -> None:
    for row in rows():
        assert any(row_of(name) is row for name in NAMES), row.theirs


def test_the_committed_names_are_those_of_the_source() -> None:
    source = os.environ.get("LORAFLEET_VLLM_SOURCE")
    if source is None:
        pytest.skip("LORAFLEET_VLLM_SOURCE names no folder with vLLM's source")
    assert committed() == read_api(Path(source) / "vllm")
