"""How far apart the chunks of a stream are: by setting, and by how far the event loop is behind."""

# All that waits for the loop is done in a turn of it. Where it keeps up, a turn is about a step's tokens.
USUAL_TURN_S = 0.008
MAX_PAUSE_S = 0.25  # For a loop that is behind.
_GAIN = 4.0


class Pace:
    """The pause after each chunk, in which tokens gather for the next. Pure.

    A chunk costs several times what a token does, most of it in the library. So a loop that is behind catches
    up with fewer, larger chunks: their pause grows as long as its turns are long, and shrinks as they are
    short. It is no function of their length, which hardly tells how far behind the loop is: what executors
    say waits in their connections, and a turn takes one message of each.
    """

    def __init__(self, interval_s: float) -> None:
        """`interval_s` is the shortest pause, 0 for none."""
        self.pause_s = interval_s
        self._interval_s = interval_s
        self._by_load_s = 0.0

    def adapt(self, turn_s: float) -> None:
        """Told, 50 times a second or less, how long a turn of the event loop took. One that took very long
        counts as one that took twice the usual time: it was a garbage collection."""
        late_s = min(turn_s - USUAL_TURN_S, USUAL_TURN_S)
        self._by_load_s = min(max(0.0, self._by_load_s + _GAIN * late_s), MAX_PAUSE_S)
        self.pause_s = max(self._interval_s, self._by_load_s)
