"""A command-line parser that does not quote what it does not know: it may be a piece of a password."""

import argparse
import re
from collections.abc import Sequence
from typing import Any

_FLAG = re.compile(r"--?[a-z][a-z0-9-]*")


class QuietParser(argparse.ArgumentParser):
    def parse_args(  # type: ignore[override]  # of argparse's overloads this has the one that we call
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        """As argparse, but unknown flags are named without their values, and unknown values only counted: a
        store's url with a space, or after a misspelt flag, would be printed with its password."""
        known: argparse.Namespace
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            names = [word.partition("=")[0] for word in unknown]
            flags = [name for name in names if _FLAG.fullmatch(name)]
            others = len(unknown) - len(flags)
            told = [*flags, *([f"{others} without a flag"] if others else [])]
            self.error(f"unrecognized arguments: {', '.join(told)} (values are not shown)")
        return known
