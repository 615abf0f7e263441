"""Triton's interpreter without what it repeats: half the time of the tests that run kernels in it."""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

from triton.runtime import interpreter


def quicken() -> None:
    _patch_once_a_launch()
    _know_types()


def _patch_once_a_launch() -> None:
    """Each call of a device function patches `triton.language` for the interpreter again, which looks at all
    its names; within a launch all are patched already. Only the first call of a launch need do that."""
    patch: Callable[[FunctionType], interpreter._LangPatchScope] = interpreter._patch_lang
    modules = (interpreter.tl, interpreter.tl.core)
    patched: set[frozenset[int]] = set()

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            super().restore()
            patched.clear()

    @cache
    def modules_of(fn: FunctionType) -> frozenset[int]:
        return frozenset(i for i, module in enumerate(modules) if module in fn.__globals__.values())

    def patch_lang(fn: FunctionType) -> interpreter._LangPatchScope:
        seen = modules_of(fn)
        scope = Scope()
        if seen not in patched:
            scope._changes = patch(fn)._changes
            patched.add(seen)
        return scope

    interpreter._patch_lang = patch_lang


def _know_types() -> None:
    """Each operation asks for the NumPy type of its values, for which a table of all types was made anew."""
    find: Callable[[Any], Any] = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def np_dtype(type_: Any) -> Any:
        if type_.name not in known:
            known[type_.name] = find(type_)
        return known[type_.name]

    interpreter._get_np_dtype = np_dtype
