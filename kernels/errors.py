"""Errors of the kernels.

ValueError
└── KernelArgumentError    an argument does not fit; `argument` is its name
"""


class KernelArgumentError(ValueError):
    """An argument of a launcher or of the metadata does not fit: the caller's bug, never a client's."""

    def __init__(self, argument: str, problem: str) -> None:
        super().__init__(f"{argument} {problem}")
        self.argument = argument
