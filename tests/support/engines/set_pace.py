"""A pace that is set by hand, to try what steps of any sizes bring."""

from executor.batch.pace import Load, Pace, StepTimes

MOST = 1 << 20


class SetPace(Pace):
    """Prompts get `room` tokens of a step while sequences decode."""

    def __init__(self, room: int) -> None:
        super().__init__(StepTimes((), MOST), MOST, None)
        self.room = room

    def most_tokens(self, load: Load) -> int:
        return load.decoding + self.room if load.decoding else MOST
