"""What versions need of a slot, worked out once for each: an adapter has hundreds of modules."""

import threading
from collections import OrderedDict
from dataclasses import dataclass

from adapter_store import ModelSpec, Version
from scheduler.lookup import check_fits

MAX_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Needs:
    """The defaults are the base model's."""

    max_rank: int = 0
    modules: frozenset[str] = frozenset()


class SlotNeeds:
    """Of versions for one base model, by digest: what is behind a digest never changes. Thread-safe."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._known: OrderedDict[str, Needs] = OrderedDict()  # used last is last
        self._lock = threading.Lock()

    def of(self, version: Version) -> Needs:
        """Raises IncompatibleAdapter as check_fits does."""
        with self._lock:
            if needs := self._known.get(version.digest):
                self._known.move_to_end(version.digest)
                return needs
        check_fits(version, self._spec)
        needs = Needs(version.manifest.max_rank, version.manifest.module_kinds)
        with self._lock:
            self._known[version.digest] = needs
            if len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        return needs
