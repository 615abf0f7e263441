"""One request as an executor has it: how far its prompt is, and since which step it decodes. Pure."""

from dataclasses import dataclass

NEVER = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """`known` tokens have to be computed before it decodes: its prompt, and after a preemption what it had
    answered, too. `left` tokens of the answer are not drawn.

    It decodes from step `began` on: the step that computes the last known token draws one, and each step that
    follows one more. Steps count one after the other on each executor. `cached` tokens of a prompt need not
    be computed, where the executor has had the session's last turn.
    """

    dispatch_id: str
    digest: str
    known: int
    left: int
    order: tuple[float, int]  # When its request was accepted, then its number here: the smaller the older.
    arrived_at: float
    session: str = ""
    shared: int = 0  # Tokens of the prompt that the session's last turn had, too.
    computed: int = 0  # Of what is known, while it does not decode.
    began: int = NEVER
    slot: int = NEVER
    blocks: int = 0
    runs: bool = False
    drawn: int = 0  # Before the last preemption.
    in_step: int = NEVER  # The last step that it is part of.
    ends_in: int = NEVER  # The step that draws its last token.
    cached: int = 0

    @property
    def decodes(self) -> bool:
        return self.began != NEVER

    @property
    def uncomputed(self) -> int:
        """Known tokens that are to be computed; for one that decodes they are one a step."""
        return self.known - self.computed

    def length(self, step: int) -> int:
        """Tokens whose place in the KV cache is taken once `step` is planned, of one that decodes."""
        return self.known + step - self.began

    def tokens(self, step: int) -> int:
        """Tokens of the answer that are drawn once `step` is over."""
        return self.drawn + (min(step, self.ends_in) - self.began + 1 if self.decodes else 0)
