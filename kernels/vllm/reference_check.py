"""What an installed vLLM has or calls that our wrapper lacks, read of its source without importing it."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from kernels.vllm.kernel_meta import LoRAKernelMeta
from kernels.vllm.punica_base import SWALLOWED
from kernels.vllm.punica_gpu import PunicaWrapperGPU, PunicaWrapperGPU33

# Each serves the versions in which it lacks nothing.
WRAPPERS: tuple[type[PunicaWrapperGPU], ...] = (PunicaWrapperGPU, PunicaWrapperGPU33)

_BASE = "lora/punica_wrapper/punica_base.py"
_CLASSES = {
    _BASE: "PunicaWrapperBase",
    "lora/punica_wrapper/punica_gpu.py": "PunicaWrapperGPU",
    "lora/ops/triton_ops/lora_kernel_metadata.py": "LoRAKernelMeta",
}
_CALLERS = ("lora/layers", "lora/model_manager.py", "model_executor/layers/fused_moe")
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


_SIZES = {"max_num_batched_tokens": 3, "max_batches": 5}


class _Config:
    max_loras = 1
    max_lora_rank = 16
    specialize_active_lora = False


def lacks(vllm: Path, ours: type[PunicaWrapperGPU] = PunicaWrapperGPU) -> list[str]:
    """Each thing that ours lacks, in a few words, of the package in the folder `vllm`; empty if it fits."""
    found: list[str] = []
    wrapper = ours(device="cpu", lora_config=_Config(), **_SIZES)
    for path, name in _CLASSES.items():
        theirs = class_of(vllm / path, name)
        if theirs is None:
            found.append(f"{path} with a class {name}")
            continue
        found += class_lacks(theirs, LoRAKernelMeta if name == "LoRAKernelMeta" else ours)
        found += buffers_lack(theirs, wrapper) if path == _BASE else ()
    for caller in _CALLERS:
        for file in [vllm / caller] if caller.endswith(".py") else sorted((vllm / caller).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            if "punica_wrapper" in text:
                found += calls_lack(ast.parse(text), wrapper)
    return list(dict.fromkeys(found))


def class_of(file: Path, name: str) -> ast.ClassDef | None:
    """The class of that name in a file, or None where either is missing."""
    nodes = ast.parse(file.read_text(encoding="utf-8")).body if file.is_file() else []
    return next((node for node in nodes if isinstance(node, ast.ClassDef) and node.name == name), None)


def class_lacks(theirs: ast.ClassDef, ours: type) -> list[str]:
    """Public methods, parameters, properties and fields of theirs that ours does not have."""
    return [f"{theirs.name}.{what}" for what in _class_lacks(theirs, ours)]


def _class_lacks(theirs: ast.ClassDef, ours: type) -> Iterator[str]:
    fields = inspect.get_annotations(ours)
    for node in theirs.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if node.target.id not in fields:
                yield node.target.id
        elif isinstance(node, ast.FunctionDef) and (node.name == "__init__" or node.name[0] != "_"):
            member = inspect.getattr_static(ours, node.name, None)
            decorators = {each.id for each in node.decorator_list if isinstance(each, ast.Name)}
            if member is None:
                yield node.name
            elif "property" not in decorators:
                yield from (
                    f"{node.name}({what})" for what in parameters_lack(node, getattr(ours, node.name))
                )


def parameters_lack(theirs: ast.FunctionDef, ours: object) -> Iterator[str]:
    """Parameters of theirs that ours does not take in that place or by that name, or cannot do without."""
    parameters = inspect.signature(ours).parameters  # type: ignore[arg-type]
    places = [parameter.name for parameter in parameters.values() if parameter.kind in _POSITIONAL]
    positional = [each.arg for each in (*theirs.args.posonlyargs, *theirs.args.args)]
    by_name = [each.arg for each in theirs.args.kwonlyargs]
    yield from (name for place, name in enumerate(positional) if places[place : place + 1] != [name])
    yield from (name for name in by_name if name not in parameters)
    variable = {parameter.kind for parameter in parameters.values()}
    if theirs.args.kwarg and inspect.Parameter.VAR_KEYWORD not in variable:
        yield f"**{theirs.args.kwarg.arg}"
    always_given = {*positional, *by_name} - _optional(theirs.args)
    for parameter in parameters.values():
        needed = parameter.default is inspect.Parameter.empty and parameter.kind not in _VARIABLE
        if needed and parameter.name not in always_given:
            yield f"{parameter.name} left out"


def _optional(arguments: ast.arguments) -> set[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaulted = positional[len(positional) - len(arguments.defaults) :]
    by_name = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {each.arg for each in defaulted} | {each.arg for each, default in by_name if default}


def buffers_lack(theirs: ast.ClassDef, wrapper: object) -> Iterator[str]:
    """Buffers that theirs makes, which layers read past any method, and that ours has not in that shape."""
    for node in ast.walk(theirs):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Attribute):
            continue
        made, name = node.value, node.targets[0].attr
        if isinstance(made, ast.Call) and ast.unparse(made.func) in ("torch.empty", "torch.zeros"):
            sizes = [_SIZES.get(ast.unparse(each), ast.unparse(each)) for each in made.args]
            ours = list(getattr(getattr(wrapper, name, None), "shape", ()))
            if [str(size) for size in sizes] != [str(size) for size in ours]:
                yield f"{theirs.name}.{name} of shape [{', '.join(map(ast.unparse, made.args))}]"


def calls_lack(tree: ast.AST, wrapper: object) -> Iterator[str]:
    """What code reads of a `punica_wrapper`, and keywords that it passes, which `wrapper` does not have."""
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else node
        if not isinstance(called, ast.Attribute) or not _is_wrapper(called.value):
            continue
        member = getattr(wrapper, called.attr, None)
        if member is None:
            yield f"punica_wrapper.{called.attr}"
        elif isinstance(node, ast.Call) and callable(member):
            names = {*inspect.signature(member).parameters, *SWALLOWED}
            for keyword in node.keywords:
                if keyword.arg is not None and keyword.arg not in names:
                    yield f"punica_wrapper.{called.attr}({keyword.arg})"


def _is_wrapper(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name == "punica_wrapper"
