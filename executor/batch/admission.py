"""What a dispatch must be to run on an engine at all. Pure."""

from executor.batch.sequence import Dispatch
from executor.errors import InvalidDispatch


def check_fits(dispatch: Dispatch, max_model_len: int, vocab_size: int) -> None:
    """Raises InvalidDispatch, naming the field."""
    known = (*dispatch.prompt_token_ids, *dispatch.output_token_ids)
    if not dispatch.prompt_token_ids:
        raise InvalidDispatch("prompt_token_ids is empty")
    if len(dispatch.prompt_token_ids) >= max_model_len or len(known) > max_model_len:
        raise InvalidDispatch(
            f"prompt_token_ids has {len(dispatch.prompt_token_ids)} tokens, "
            f"and max_model_len {max_model_len} leaves no room for an answer"
        )
    if not 0 <= min(known) <= max(known) < vocab_size:
        raise InvalidDispatch(f"a token id is outside the vocabulary of {vocab_size}")
    named = {
        "logit_bias": (token for token, _ in dispatch.sampling.logit_bias),
        "allowed_token_ids": dispatch.allowed_token_ids,
        "bad_words": (token for word in dispatch.bad_words for token in word),
    }
    for field, tokens in named.items():
        if not all(token < vocab_size for token in tokens):
            raise InvalidDispatch(f"{field} names a token outside the vocabulary of {vocab_size}")
