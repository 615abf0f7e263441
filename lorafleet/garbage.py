"""When a service looks for garbage in cycles: while it is idle, or else after much has come."""

import gc

# A full collection stops every thread for as long as it takes to look through all that is there. Of itself
# Python begins one after 77,000 new objects. A service that is never idle has one after so many: 100 MB, if
# all of them are garbage.
MOST_NEW_OBJECTS = 770_000


class QuietCollector:
    """The collector of the whole process; all calls on one thread. Only cycles wait for it: all else is freed
    at once.

    What is there at `start` stays, and is not looked through again. What comes later is never frozen: it ends
    some day, perhaps in a cycle, which would then be lost.
    """

    def __init__(self) -> None:
        self._thresholds = gc.get_threshold()

    def start(self) -> None:
        gc.collect()
        gc.freeze()
        # Python also waits for a quarter of what the last full collection found: now that is next to nothing.
        gc.collect()
        young, middle, _ = self._thresholds
        gc.set_threshold(young, middle, max(1, MOST_NEW_OBJECTS // (young * (middle + 1))))

    def idle(self) -> None:
        """Nobody waits for this process: a full collection, if much has come since the last one."""
        _, _, middle_collections = gc.get_count()
        if middle_collections:
            gc.collect()

    def stop(self) -> None:
        """Everything is as before; else the interpreter, at its end, calls all that was frozen leaked."""
        gc.unfreeze()
        gc.set_threshold(*self._thresholds)
