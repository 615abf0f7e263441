"""What a request will cost, as far as it can be told before its prompt is tokenized."""

from lorafleet.v1 import inference_pb2
from scheduler.tenants.rates import Costs

# Rather more tokens than there are: who is told to come again on that shall find enough.
_CHARS_PER_TOKEN = 3


def costs_of(request: inference_pb2.GenerateRequest, max_model_len: int) -> tuple[Costs, Costs]:
    """At least, and about. Of a prompt that is no text yet as many tokens as it has. What a client brings of
    an answer that nobody here has accepted is read as its prompt is."""
    match request.WhichOneof("prompt"):
        case "token_ids":
            prompt = least_prompt = len(request.token_ids.ids)
        case "chat":
            chars = sum(len(message.content) for message in request.chat.messages)
            prompt, least_prompt = chars // _CHARS_PER_TOKEN + 1, 1
        case _:
            prompt, least_prompt = len(request.text) // _CHARS_PER_TOKEN + 1, 1
    # What the model does not take will be refused: no more is kept for when it comes again.
    prompt, least_prompt = min(prompt, max_model_len), min(least_prompt, max_model_len)
    room = max(1, max_model_len - prompt)
    stopping, brought = request.stopping, min(len(request.resume.output_token_ids), room)
    wanted = min(stopping.max_new_tokens if stopping.HasField("max_new_tokens") else room, room)
    output = max(0, wanted - brought)
    return Costs(1, least_prompt + brought, min(output, 1)), Costs(1, prompt + brought, output)
