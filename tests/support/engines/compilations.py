"""What Triton compiles while something runs."""

from collections.abc import Iterator
from contextlib import contextmanager

from triton.runtime.jit import JITFunction


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of the kernels, as they are compiled (or read from Triton's cache)."""
    compiled: list[str] = []
    original = JITFunction._do_compile

    def compile_it(self: JITFunction, *args: object, **kwargs: object) -> object:
        compiled.append(self.fn.__name__)
        return original(self, *args, **kwargs)

    JITFunction._do_compile = compile_it
    try:
        yield compiled
    finally:
        JITFunction._do_compile = original
