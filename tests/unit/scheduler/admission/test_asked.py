"""What a request is taken to cost before anything of it is checked."""

from lorafleet.v1 import common_pb2, inference_pb2
from scheduler.admission.asked import costs_of
from scheduler.tenants.rates import Costs


def test_no_request_is_taken_to_cost_more_than_the_model_takes() -> None:
    """That is kept of its tenant's rates when it is told to come again, though it will be refused then."""
    ids, stopping = inference_pb2.TokenIds(ids=[1] * 100_000), common_pb2.Stopping(max_new_tokens=9_000)
    resume = inference_pb2.Resume(output_token_ids=[1] * 100_000)
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(content="x" * 300_000)])
    for prompt in ({"token_ids": ids}, {"text": "x" * 300_000}, {"chat": chat}, {"text": "x"}):
        request = inference_pb2.GenerateRequest(stopping=stopping, resume=resume, **prompt)  # type: ignore[arg-type]
        least, guess = costs_of(request, 4096)
        assert max(least.prompt_tokens, guess.prompt_tokens + guess.output_tokens) <= 4096 + 1


def test_what_fits_is_taken_as_it_is() -> None:
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[1] * 100),
        stopping=common_pb2.Stopping(max_new_tokens=50),
        resume=inference_pb2.Resume(output_token_ids=[1] * 20),
    )
    assert costs_of(request, 4096) == (Costs(1, 120, 1), Costs(1, 120, 30))
