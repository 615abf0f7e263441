"""The names and parameters of the reference API: read of vLLM's source, and as they are committed here.

`python -m tests.kernels.vllm.api FOLDER` writes the committed list anew from a folder that holds `vllm`.
"""

import ast
import json
import sys
from pathlib import Path

COMMITTED = Path(__file__).with_name("api.json")
FOLDERS = ("lora/punica_wrapper", "lora/ops/triton_ops", "lora/layers")
# Another platform's wrapper.
LEFT_OUT = ("punica_xpu.py",)

# By "Class.method" or "function"; None for a property, and a dataclass's or class's own line has its fields.
Names = dict[str, list[str] | None]


def committed() -> dict[str, Names]:
    """By the path of the file that has them."""
    loaded: dict[str, dict[str, str | None]] = json.loads(COMMITTED.read_text())
    return {
        file: {name: None if each is None else each.split() for name, each in names.items()}
        for file, names in loaded.items()
    }


def read_api(vllm: Path) -> dict[str, Names]:
    api = {}
    for folder in FOLDERS:
        for file in sorted((vllm / folder).glob("*.py")):
            names = {} if file.name in LEFT_OUT else _names(ast.parse(file.read_text()))
            if names:
                api[f"{folder}/{file.name}"] = names
    return api


def _names(module: ast.Module) -> Names:
    # An operation is a function with an underscore, assigned to its name once it is registered.
    assigned = {
        target.id
        for node in ast.walk(module)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    names: Names = {}
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            name = node.name.lstrip("_") if node.name.lstrip("_") in assigned else node.name
            if name[0] != "_":
                names[name] = _parameters(node)
        elif isinstance(node, ast.ClassDef):
            names |= _members(node)
    return names


def _members(theirs: ast.ClassDef) -> Names:
    fields = [
        node.target.id
        for node in theirs.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    names: Names = {theirs.name: fields}
    for node in theirs.body:
        if isinstance(node, ast.FunctionDef) and (node.name == "__init__" or node.name[0] != "_"):
            decorators = {each.id for each in node.decorator_list if isinstance(each, ast.Name)}
            names[f"{theirs.name}.{node.name}"] = None if "property" in decorators else _parameters(node)
    return names


def _parameters(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    starred = [each.arg for each in (arguments.vararg, arguments.kwarg) if each]
    return [each.arg for each in named if each.arg not in ("self", "cls")] + [f"*{name}" for name in starred]


if __name__ == "__main__":
    written = {
        file: {name: None if each is None else " ".join(each) for name, each in names.items()}
        for file, names in read_api(Path(sys.argv[1]) / "vllm").items()
    }
    COMMITTED.write_text(json.dumps(written, indent=1) + "\n")
