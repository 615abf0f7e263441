"""How far apart the chunks of a stream are: by setting, and by how far the event loop is behind."""

USUAL_LAG_S = 0.008  # Where the loop keeps up, a step's chunks are written within this time.
MAX_PAUSE_S = 0.25  # For a loop that is behind.
_GAIN = 4.0
_NEW_STREAM_S = 0.02


class Pace:
    """The pause after each chunk, in which tokens gather for the next. Pure.

    A chunk costs several times what a token does, most of it in the library. So a loop that is behind catches
    up with fewer, larger chunks: their pause grows as long as it is far behind, and shrinks as it is not. It
    is no function of the lag, which hardly tells how much more there is to do: what executors say waits in
    their connections, and a turn of the loop takes one message of each.
    """

    def __init__(self, interval_s: float) -> None:
        """`interval_s` is the shortest pause, 0 for none."""
        self.pause_s = interval_s
        self._interval_s = interval_s
        self._by_load_s = 0.0

    def adapt(self, lag_s: float) -> None:
        """Told, 50 times a second or less, how far the event loop is behind. Very far counts as twice the
        usual: it was a garbage collection."""
        self._add(_GAIN * min(lag_s - USUAL_LAG_S, USUAL_LAG_S))

    def begins(self) -> None:
        """A stream begins: while the loop is behind, the others make room for those that come after it."""
        if self._by_load_s:
            self._add(_NEW_STREAM_S)

    def _add(self, seconds: float) -> None:
        self._by_load_s = min(max(0.0, self._by_load_s + seconds), MAX_PAUSE_S)
        self.pause_s = max(self._interval_s, self._by_load_s)
