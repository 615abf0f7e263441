"""Which version a split alias gives a caller: weighted rendezvous hashing. Pure, everywhere the same.

Every target draws a number from (alias, target, key) and the best one wins: -ln(u) / weight is the time of
an event with that rate, and the first of several such events is target i's with probability
weight_i / sum(weights). So a key keeps its version as long as nothing is said about the weights; when one
weight is raised keys move to that target only, and when one is lowered they move away from it only.
(Highest random weight: Thaler and Ravishankar, 1998.)
"""

import hashlib
import math
from collections.abc import Mapping


def choose(alias: str, weights: Mapping[str, int], key: str) -> str:
    """The digest for `key` (a session or a request). `weights`: by digest, at least one, all above 0."""
    return min(sorted(weights), key=lambda digest: _time(alias, digest, key) / weights[digest])


def _time(alias: str, digest: str, key: str) -> float:
    drawn = hashlib.sha256(f"{alias}\0{digest}\0{key}".encode()).digest()
    return -math.log((int.from_bytes(drawn[:8]) + 1) / (2**64 + 1))
