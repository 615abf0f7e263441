"""The house stays one that readers find the way in: few files a folder, and a line that says what each is."""

import ast
import tomllib
from pathlib import Path

import pytest

from tests.contracts.house import GENERATED, PACKAGES, ROOT, files, folders, line, name

MOST_FILES = 25
LONGEST_LINE = 100
# Where others are at work; the list only gets shorter.
WITHOUT_SUBJECTS = (
    "executor/batch", "executor/engine", "executor/layers", "executor/models", "executor/step",
    "executor/waiting_room", "kernels/vllm", "lorafleet/client", "lorafleet/demo", "scheduler/admission",
    "scheduler/dispatch", "scheduler/text",
)  # fmt: skip
WRITTEN = [folder for folder in folders() if folder != GENERATED]


@pytest.mark.parametrize("folder", WRITTEN, ids=name)
def test_a_folder_holds_one_layer(folder: Path) -> None:
    assert len(files(folder)) <= MOST_FILES, "which layers are in there?"


@pytest.mark.parametrize("folder", list(folders()), ids=name)
def test_a_folder_says_in_one_line_what_it_is(folder: Path) -> None:
    """Without an `__init__.py` all who walk packages pass over it, and import contracts, too."""
    assert 0 < len(line(folder)) <= LONGEST_LINE
    assert line(folder).endswith(".")


@pytest.mark.parametrize("folder", WRITTEN, ids=name)
def test_every_file_says_in_one_line_what_it_is(folder: Path) -> None:
    lines = {name(file): line(file) for file in files(folder)}
    assert not [file for file, text in lines.items() if not 0 < len(text) <= LONGEST_LINE]


@pytest.mark.parametrize("folder", WRITTEN, ids=name)
def test_a_docstring_says_what_it_speaks_of(folder: Path) -> None:
    """No sentence: "Of all pieces, in hex."; but "The hash of all pieces, in hex." is one."""
    checked = [file for file in files(folder) if not name(file).startswith(WITHOUT_SUBJECTS)]
    nodes = [(file, node) for file in checked for node in ast.walk(ast.parse(file.read_text()))]
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    told = [(name(file), ast.get_docstring(node) or "") for file, node in nodes if isinstance(node, kinds)]
    assert not [each for each in told if each[1].startswith(("Of ", "As ", "For ", "By ", "With "))]


def test_the_contract_against_circles_covers_every_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = [each for each in settings["contracts"] if each["type"] == "acyclic_siblings"]
    assert contract["ancestors"] == settings["root_packages"] == list(PACKAGES)
    # Nothing is let through: no import is ignored, no depth left out; late ones and those for types count.
    assert contract.keys() == {"name", "type", "ancestors"}
    assert settings.keys() == {"root_packages", "include_external_packages", "contracts"}


def test_unit_tests_lie_as_what_they_test() -> None:
    """Two of their folders are of no folder of source: what holds of every store, and a whole scheduler."""
    units = ROOT / "tests" / "unit"
    tested = {file.parent.relative_to(units) for file in units.rglob("test_*.py")}
    assert tested - {folder.relative_to(ROOT) for folder in folders()} == {
        Path("adapter_store/every_store"),
        Path("scheduler/service"),
    }
