"""Triton's interpreter without what it repeats: half the time of the tests that run kernels in it.

Each call of a device function patches `triton.language` for the interpreter again, which looks at every name
there; within a launch it finds all of them patched already. Only the first call of a launch need do that.
"""

from collections.abc import Callable
from types import FunctionType

from triton.runtime import interpreter


def patch_once_a_launch() -> None:
    patch: Callable[[FunctionType], interpreter._LangPatchScope] = interpreter._patch_lang
    modules = (interpreter.tl, interpreter.tl.core)
    patched: set[frozenset[int]] = set()

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            super().restore()
            patched.clear()

    def patch_lang(fn: FunctionType) -> interpreter._LangPatchScope:
        seen = frozenset(i for i, module in enumerate(modules) if module in fn.__globals__.values())
        if seen in patched:
            return Scope()
        scope = Scope()
        scope._changes = patch(fn)._changes
        patched.add(seen)
        return scope

    interpreter._patch_lang = patch_lang
