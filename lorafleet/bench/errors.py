"""What makes a measurement impossible; a failed request does not, but is counted in the results.

BenchError          a wrong setting, file or folder; the text says which and what to do
└── EngineEnded     the engine under test is gone
"""


class BenchError(Exception):
    """One line for the user."""


class EngineEnded(BenchError):
    """The text ends with the last line that it logged."""
