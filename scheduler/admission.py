"""From a request on the wire to one that the queue can take, or a typed error."""

from dataclasses import dataclass

from lorafleet.v1 import common_pb2, inference_pb2
from scheduler.auth import Authenticator, Identity

__all__ = ["AdmittedRequest", "Authenticator", "Identity"]


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request after all checks. Its proto messages are completed copies that nobody changes any more.

    `adapter` is "tenant/name" and `digest` the resolved version; both are empty for the base model.
    `resumed_token_ids` were delivered before a resumption. `cache_salt` is 32 bytes made from tenant and
    client salt. `echo_text` is what the stream's text starts with. `max_rank` and `modules` are what the
    version needs of a slot (0 and nothing for the base model).
    """

    request_id: str
    identity: Identity
    adapter: str
    digest: str
    prompt_token_ids: tuple[int, ...]
    resumed_token_ids: tuple[int, ...]
    sampling: common_pb2.Sampling
    stopping: common_pb2.Stopping
    response: inference_pb2.ResponseOptions
    priority: int
    cache_salt: bytes
    echo_text: str
    max_rank: int
    modules: frozenset[str]
