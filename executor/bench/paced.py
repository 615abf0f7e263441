"""A real executor process around an engine that only sleeps: `python -m executor.bench.paced`.

Everything else is the product: engine thread, hub, streams, metrics. So what a client measures through a
scheduler is the cost of the way there and back, at any speed of steps: STEP_MS in the environment.
Nothing here waits for torch.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from adapter_store import ModelSpec
from executor.__main__ import main
from executor.batch.rates import UNKNOWN, Rates
from executor.batch.sampling import SampledToken
from executor.batch.sequence import Dispatch, FinishReason, Key
from executor.config import ExecutorConfig
from executor.events import EngineInfo, Finished, NewToken, Status, StepEvents
from executor.metrics import Metrics

if TYPE_CHECKING:
    from executor.engine import Engine


def paced_token(prompt: Sequence[int], index: int) -> int:
    """Token `index` of the answer to a prompt: a gap shows, and mostly another's answer, too."""
    return 3 + (prompt[0] + index) % 64


class PacedEngine:
    """One token for every dispatch each `step_s`, never an end token; max_new_tokens must be set."""

    def __init__(self, info: EngineInfo, step_s: float, ended: Callable[[str], None] = lambda outcome: None):
        """`ended` counts dispatches by how they ended."""
        self.info = info
        self._ended = ended
        self.batcher = self  # the engine's thread asks it for `sequences`
        self.sequences: dict[Key, tuple[Dispatch, int]] = {}
        self._step_s = step_s
        self._steps = 0
        self._due = 0.0

    def step(self) -> StepEvents:
        if not self.sequences:
            return StepEvents(self._steps, False, False, (), (), (), None, self._status())
        self._wait()
        self._steps += 1
        tokens, finished = [], []
        for key, (dispatch, index) in list(self.sequences.items()):
            token = SampledToken(paced_token(dispatch.prompt_token_ids, index), 0.0, ())
            tokens.append(NewToken(key, index, token, False))
            self.sequences[key] = dispatch, index + 1
            if index + 1 >= (dispatch.stop.max_new_tokens or 0):
                del self.sequences[key]
                self._ended(FinishReason.LENGTH.value)
                finished.append(Finished(key, FinishReason.LENGTH, 0))
        return StepEvents(self._steps, True, False, tuple(tokens), tuple(finished), (), None, self._status())

    def add(self, dispatch: Dispatch) -> None:
        self.sequences[dispatch.key] = dispatch, len(dispatch.output_token_ids)

    def cancel(self, key: Key) -> None:
        if self.sequences.pop(key, None):
            self._ended("cancelled")

    def prefetch(self, digest: str, in_s: float = 0.0, uses: int = 1) -> None:
        """Nothing is ever loaded."""

    def drain(self) -> None:
        """The app waits for what is accepted."""

    def close(self) -> None:
        """Nothing is held."""

    def _wait(self) -> None:
        """Steps end at a steady pace, as on a device that runs beside this process."""
        now = time.perf_counter()
        self._due = max(self._due + self._step_s, now)
        time.sleep(self._due - now)

    def _status(self) -> Status:
        used = len(self.sequences)
        return Status(
            running=used,
            free_seats=self.info.max_seats - used,
            free_kv_blocks=self.info.num_kv_blocks,
            free_slots=self.info.max_loras,
            rates=self._rates() if self._steps else UNKNOWN,
        )

    def _rates(self) -> Rates:
        """The rates as an engine tells them that has run: prompts take no time here."""
        left = sum((job.stop.max_new_tokens or 0) - index for job, index in self.sequences.values())
        seats = len(self.sequences)
        return Rates(token_interval=self._step_s, tokens=seats / self._step_s, answer_tokens_left=left)


def build(config: ExecutorConfig, *_: Any, metrics: Metrics, **__: Any) -> "Engine":
    """In place of `executor.build.build_engine`."""
    spec = ModelSpec.from_folder(Path(config.model))
    info = EngineInfo(
        model_name=spec.name,
        model_dtype=config.model_dtype,
        model_fingerprint=spec.fingerprint,
        max_model_len=spec.max_model_len,
        max_rank=config.max_lora_rank,
        modules=tuple(config.lora_modules),
        max_loras=config.max_loras if config.max_loras > 0 else 64,  # auto
        max_seats=config.max_seats,
        num_kv_blocks=config.num_kv_blocks or 4096,  # unset, it is measured on the device
        block_size=config.block_size,
    )
    step_s = float(os.environ.get("STEP_MS", "9")) / 1000
    return cast("Engine", PacedEngine(info, step_s, metrics.dispatch_ended))


if __name__ == "__main__":
    raise SystemExit(main(build))
