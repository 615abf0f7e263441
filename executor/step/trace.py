"""What a step tells of itself while it is made, for whoever wants to know where its time goes."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from executor.adapters.pager import Pager
    from executor.batch.batcher import Batcher, StepPlan


@dataclass(slots=True)
class TracedStep:
    """`told`: what is known of it. `begins` and `ends`: events around it on the device, None on the CPU.
    `host`: seconds by part of the host's work; `used`: what else adds up there."""

    told: dict[str, Any]
    begins: "torch.cuda.Event | None"
    ends: "torch.cuda.Event | None"
    host: dict[str, float] = field(default_factory=dict)
    used: dict[str, float] = field(default_factory=dict)


class Trace:
    """This one forgets all that it is told. All calls are on the engine's thread.

    A heartbeat is `beat_begins`, laps, perhaps `launched`, some `drawn` and `landed`, and `beat_over`.
    """

    def beat_begins(self) -> None:
        """What was between two heartbeats is over: commands, callbacks, or nothing to do."""

    def lap(self, part: str) -> None:
        """The time since the lap before went into this part."""

    def captured(self, rows: int) -> None:
        """The step replays a captured one of so many rows; not told of one that runs layer by layer."""

    def device_begins(self) -> None:
        """Nothing of the step is enqueued yet."""

    def launched(self, plan: "StepPlan", batcher: "Batcher", pager: "Pager[Any]") -> TracedStep | None:
        """The laps since the last step's are this one's, and so is what waits now."""
        return None

    def drawn(self, step: TracedStep | None) -> None:
        """All of it is enqueued, its draw, too."""

    def landed(self, step: TracedStep | None, seconds: float) -> None:
        """It took so long since it was launched, or since the one before it was over."""

    def beat_over(self) -> None:
        """Events are about to be handed out."""

    def close(self) -> None:
        """No step follows."""


NO_TRACE = Trace()
