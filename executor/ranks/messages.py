"""What goes over the pipes between rank 0 and another rank."""

from dataclasses import dataclass

from executor.rejection import Rejection
from executor.step.inputs import SequenceRows


@dataclass(frozen=True, slots=True)
class Hello:
    """First word of a rank: it runs, and is about to meet the others."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Its share of the model is loaded."""

    nbytes_per_slot: int


@dataclass(frozen=True, slots=True)
class StartFailed:
    message: str


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run the model over these rows. No answer: the layers' collectives keep the ranks together."""

    sequences: tuple[SequenceRows, ...]


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """On a lane: read an adapter and keep its image under `ticket`. Answered by Done or Failed."""

    ticket: int
    digest: str


@dataclass(frozen=True, slots=True)
class ForgetImage:
    ticket: int


@dataclass(frozen=True, slots=True)
class CopyIntoSlot:
    """Answered by Done, when the copy is complete, or Failed."""

    slot: int
    ticket: int


@dataclass(frozen=True, slots=True)
class ClearSlot:
    slot: int


@dataclass(frozen=True, slots=True)
class Done:
    nbytes: int = 0  # of the image, after LoadAdapter


@dataclass(frozen=True, slots=True)
class Failed:
    rejection: Rejection


Control = RunStep | CopyIntoSlot | ClearSlot | ForgetImage
Answer = Done | Failed
