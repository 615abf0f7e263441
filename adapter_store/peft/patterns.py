"""rank_pattern and alpha_pattern: PEFT's regexes over module paths, from files nobody vouches for.

Python's `re` backtracks, so a pattern of a few characters can run for years. Instead of a second regex
engine we admit only patterns whose worst case is small: no repeated group, no look-around, no
back-reference, and a bounded number of choices.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MAX_PATTERN_CHARS = 512
MAX_PATTERNS = 4096
# A star may stop at each of about 64 places in a module path, a `?` or `|` at 2: their product bounds the
# paths that backtracking can try. Three stars fit, as do two stars and six choices.
MAX_TOTAL_COST = 2**19
_REPEATS = "*+{"


class BadPattern(ValueError):
    """Names the pattern and what is wrong with it."""


@dataclass(frozen=True)
class Patterns:
    """The first pattern that matches the tail of a module path at a dot boundary gives the value."""

    _compiled: tuple[tuple[re.Pattern[str], float], ...]

    @classmethod
    def compile(cls, values: Mapping[str, float]) -> "Patterns":
        if len(values) > MAX_PATTERNS:
            raise BadPattern(f"holds {len(values)} patterns, at most {MAX_PATTERNS} are read")
        _check_cost(values)
        return cls(tuple((_compile(pattern), value) for pattern, value in values.items()))

    def lookup(self, path: str, default: float) -> float:
        """`path` as the model names it: "model.layers.0.self_attn.q_proj"."""
        return next((value for regex, value in self._compiled if regex.match(path)), default)


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        re.compile(pattern)  # by itself: ")(" would be well-formed inside the brackets below
        return re.compile(rf"(.*\.)?({pattern})$")  # as peft.utils.other.get_pattern_key does
    except (re.error, OverflowError, RecursionError) as error:
        raise BadPattern(f"pattern {pattern!r} is not a regular expression: {error}") from error


def _check_cost(patterns: Iterable[str]) -> None:
    total = 0
    for pattern in patterns:
        if len(pattern) > MAX_PATTERN_CHARS:
            raise BadPattern(f"pattern {pattern[:40]!r}... is longer than {MAX_PATTERN_CHARS} characters")
        total += _cost(pattern)
        if total > MAX_TOTAL_COST:
            raise BadPattern(f"pattern {pattern!r} could match in too many ways: use fewer of * + ? | {{")


def _cost(pattern: str) -> int:
    """An upper bound on the ways to match one path, up to the few dots it may start after."""
    # A character class or an escape is one character; what remains has its structure in plain sight.
    plain = re.sub(r"\\[^0-9]|\[\^?\]?(?:\\.|[^\]\\])*\]", "x", pattern)
    if re.search(r"\)[*+{]", plain):
        raise BadPattern(f"pattern {pattern!r} repeats a group, which is not served")
    if re.search(r"\(\?(?!:)|\\", plain):
        raise BadPattern(
            f"pattern {pattern!r} uses look-around, flags or a back-reference, which is not served"
        )
    choices = plain.replace("(?:", "(")
    repeats = sum(choices.count(sign) for sign in _REPEATS)
    options = choices.count("?") + choices.count("|")
    return 1 << min(6 * repeats + options, 64)
