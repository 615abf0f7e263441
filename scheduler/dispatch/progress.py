"""The output of one request so far, and the dispatch with which it goes on, on any executor."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lorafleet.v1 import common_pb2, executor_pb2
from scheduler.admission.admission import AdmittedRequest


@dataclass(slots=True)
class Progress:
    """A request's output so far, over all attempts and, before them, what the client brought along."""

    admitted: AdmittedRequest
    end_token_ids: frozenset[int]  # Stop tokens, and the model's own unless they are ignored.
    output: list[int] = field(init=False)
    has_prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        self.output = list(self.admitted.resumed_token_ids)

    def accept(self, first_index: int, token_ids: Sequence[int]) -> bool:
        """Appends an attempt's tokens; False, and nothing appended, when they leave a gap or overlap."""
        if first_index != len(self.output):
            return False
        self.output.extend(token_ids)
        return True

    @property
    def complete(self) -> common_pb2.FinishReason | None:
        """Why nothing is left to generate, if so: an attempt can be lost just before it tells its end."""
        stopping = self.admitted.stopping
        if self.output and self.output[-1] in self.end_token_ids:
            return common_pb2.FINISH_REASON_STOP
        if stopping.HasField("max_new_tokens") and len(self.output) >= stopping.max_new_tokens:
            return common_pb2.FINISH_REASON_LENGTH
        return None

    def dispatch(self, dispatch_id: str, time_left_ms: int, waited_ms: int = 0) -> executor_pb2.Dispatch:
        """The next attempt. `time_left_ms` is of the request's time limit, 0 without one; `waited_ms` counts
        from its acceptance."""
        admitted = self.admitted
        stopping = common_pb2.Stopping()
        stopping.CopyFrom(admitted.stopping)
        stopping.ClearField("stop_sequences")  # Found here, in the text.
        stopping.ClearField("time_limit_ms")  # Counted here, from acceptance; the rest is in time_left_ms.
        dispatch = executor_pb2.Dispatch(
            dispatch_id=dispatch_id,
            request_id=admitted.request_id,
            digest=admitted.digest,
            prompt_token_ids=admitted.prompt_token_ids,
            output_token_ids=self.output,
            sampling=admitted.sampling,
            stopping=stopping,
            cache_salt=admitted.cache_salt,
            time_left_ms=time_left_ms,
            waited_ms=waited_ms,
            adapter=admitted.adapter,
        )
        if admitted.response.HasField("logprobs"):
            dispatch.logprobs = admitted.response.logprobs
        if admitted.response.HasField("prompt_logprobs") and not self.has_prompt_logprobs:
            dispatch.prompt_logprobs = admitted.response.prompt_logprobs
        admitted.masks.put_into(dispatch)
        dispatch.masked_logprobs = admitted.response.masked_logprobs
        return dispatch
