"""The folders of source and what each file says of itself: `make map` prints them, tests hold them."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("lorafleet", "scheduler", "executor", "adapter_store", "kernels")
GENERATED = ROOT / "lorafleet" / "v1"


def folders() -> Iterator[Path]:
    """Every folder with Python files in it or below it, each package before the folders in it."""
    for package in PACKAGES:
        found = {folder for file in (ROOT / package).rglob("*.py") for folder in file.parents}
        yield from sorted(folder for folder in found if folder.is_relative_to(ROOT / package))


def files(folder: Path) -> list[Path]:
    """The Python files of a folder, but for what says what the folder is."""
    return sorted(file for file in folder.glob("*.py") if file.name != "__init__.py")


def name(path: Path) -> str:
    """As READMEs write it: `executor/batch/`, `executor/batch/slots.py`."""
    return f"{path.relative_to(ROOT)}{'/' if path.is_dir() else ''}"


def line(path: Path) -> str:
    """The first line of a file's docstring, of a folder's `__init__.py`; empty without one."""
    file = path / "__init__.py" if path.is_dir() else path
    if not file.exists():
        return ""
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    return docstring.partition("\n")[0]


def main() -> None:
    for folder in folders():
        sys.stdout.write(f"\n{name(folder)}  {line(folder)}\n")
        width = max((len(file.name) for file in files(folder)), default=0)
        for file in [] if folder == GENERATED else files(folder):
            sys.stdout.write(f"    {file.name:{width}}  {line(file)}\n")


if __name__ == "__main__":
    main()
