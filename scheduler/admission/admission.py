"""Turns a request on the wire into one that the queue can take, or into a typed error."""

import asyncio
import codecs
import hashlib
import secrets
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import adapter_store
from adapter_store import InvalidRef, ModelSpec, Ref, Version
from lorafleet.doors.held import Held
from lorafleet.v1 import common_pb2, inference_pb2
from scheduler.admission import validation
from scheduler.admission.constraints import Constraints
from scheduler.admission.identity import INFER, Identity
from scheduler.admission.lookup import check_fits, find_version, parse_ref, require
from scheduler.admission.masks import NO_MASKS, Masks, bad_word_tokens, check_masks
from scheduler.admission.versions import Versions
from scheduler.errors import InvalidRequest, QueueFull, StoreUnavailable
from scheduler.text.chat import ChatTemplates
from scheduler.text.long_texts import TextThreads
from scheduler.text.text_stream import PROMPT_TAIL
from scheduler.text.tokenizer import Tokenizer
from scheduler.workers.workers import MAX_TENANT_CALLS

MAX_FITTING = 4096
MAX_LOOKS = 10

__all__ = ["Admission", "AdmittedRequest", "Identity"]


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request after all checks. Its proto messages are completed copies that nobody changes any more.

    `adapter` is "tenant/name" and `digest` the resolved version; both are empty for the base model.
    `resumed_token_ids` were delivered before a resumption. `cache_salt` is 32 bytes made from tenant and
    client salt. `echo_text` is what the stream's text starts with. `max_rank`, `modules` and `full_heads` are
    what the version needs of an executor (0 and nothing for the base model). `session` is equal for turns of
    one session that can share a prefix, and "" without a session_id. `stopping.max_new_tokens` is set, fits
    the model's length, and counts the resumed tokens; `stopping.stop_token_ids` has the version's own ends.
    `masks` are what its answer is held to.
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
    full_heads: int = 0
    session: str = ""
    masks: Masks = NO_MASKS


class Admission:
    """Checks and completes requests. The store and the tokenizer work in `pool`, never on the event loop.

    `max_admitting` requests at once, more are refused: each holds its prompt while it waits for the pool.
    Twice as many may be there for a tenant that has no other one among them.
    """

    def __init__(
        self,
        versions: Versions,
        tokenizer: Tokenizer,
        spec: ModelSpec,
        max_model_len: Callable[[], int] | int,
        pool: Executor,
        max_admitting: int = 1024,
        *,
        constraints: Constraints,
        max_template_calls: Callable[[str], int] = lambda tenant: MAX_TENANT_CALLS,
    ) -> None:
        self._versions = versions
        self._tokenizer = tokenizer
        self._spec = spec
        self._max_model_len = max_model_len
        self._pool = pool
        self._constraints = constraints
        self._admitting = Held("requests under check", max_admitting, QueueFull, first=2.0)
        self._fitting: set[str] = set()  # Digests.
        self._texts = TextThreads(pool)
        self.templates = ChatTemplates(
            tokenizer.chat_template, tokenizer.special_tokens, pool, max_calls=max_template_calls
        )

    @property
    def max_model_len(self) -> int:
        """The longest prompt plus answer, in tokens."""
        return self._max_model_len if isinstance(self._max_model_len, int) else self._max_model_len()

    async def admit(
        self, request: inference_pb2.GenerateRequest, identity: Identity, *, one_message: bool = False
    ) -> AdmittedRequest:
        """`one_message`: the answer is sent whole. Nothing is waited for after the last look at the version:
        it takes requests when this returns, so submit the request at once. An alias that moved on from a
        version that was withdrawn meanwhile is looked up again.

        Raises InvalidRequest, AdapterNotFound, PermissionDenied, IncompatibleAdapter, NoConstraints,
        StoreUnavailable, QueueFull, TooMuchHeld.
        """
        with self._admitting.one(identity.tenant, request.request_id):
            return await self._admit(request, identity, one_message)

    async def _admit(
        self, request: inference_pb2.GenerateRequest, identity: Identity, one_message: bool
    ) -> AdmittedRequest:
        validation.check_prompt_form(request)
        validation.check_sampling(request.sampling, self._spec.vocab_size)
        validation.check_stopping(request.stopping, self._spec.vocab_size)
        validation.check_response(request.response)
        check_masks(request, self._spec.vocab_size)
        request_id = request.request_id or uuid.uuid4().hex
        for _ in range(MAX_LOOKS):
            version = await self._version(request, identity, request.session_id or request_id)
            require(identity, INFER, "generating text")
            admitted = await self._admitted(request, request_id, identity, version, one_message)
            if version is None or await self._still_takes(version, resumed=request.HasField("resume")):
                return admitted
        raise StoreUnavailable("others keep changing this adapter")

    async def _admitted(
        self,
        request: inference_pb2.GenerateRequest,
        request_id: str,
        identity: Identity,
        version: Version | None,
        one_message: bool,
    ) -> AdmittedRequest:
        masks = await self._masks(request, identity.tenant)
        prompt = await self._prompt(request, version, identity.tenant)
        stopping = validation.complete_stopping(request.stopping, len(prompt), self.max_model_len)
        resumed = validation.check_resume(request, stopping, self._spec.vocab_size)
        validation.check_prompt_logprobs(request.response, len(prompt))
        if one_message:
            validation.check_fits_one_message(request.response, stopping)
        if version is not None and not stopping.ignore_eos:
            ends = version.manifest.text.end_token_ids
            stopping.stop_token_ids.extend(each for each in ends if each not in stopping.stop_token_ids)
        digest, salt = version.digest if version else "", _cache_salt(identity.tenant, request.cache_salt)
        return AdmittedRequest(
            request_id=request_id,
            identity=identity,
            adapter=f"{version.tenant}/{version.name}" if version else "",
            digest=digest,
            prompt_token_ids=prompt,
            resumed_token_ids=resumed,
            sampling=_with_seed(request),
            stopping=stopping,
            response=_copied(request.response),
            priority=request.priority,
            cache_salt=salt,
            echo_text=await self._echo_text(request, prompt, identity.tenant),
            max_rank=version.manifest.max_rank if version else 0,
            modules=version.manifest.module_kinds if version else frozenset(),
            full_heads=len(version.manifest.full_heads) if version else 0,
            session=_session(salt, digest, request.session_id),
            masks=masks,
        )

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest, identity: Identity
    ) -> tuple[tuple[int, ...], list[str]]:
        """The prompt's token ids, and each token as the vocabulary writes it. Raises as admit does."""
        with self._admitting.one(identity.tenant):
            validation.check_prompt_form(request)
            version = None
            if request.HasField("adapter"):
                ref = parse_ref(request.adapter, identity)
                version = await self._find(ref, identity, request.adapter, None)
            require(identity, INFER, "tokenizing")
            ids = await self._prompt(request, version, identity.tenant)
            written = await self._texts.run(
                len(ids), lambda: [*map(self._tokenizer.token, ids)], identity.tenant
            )
            return ids, written

    async def close(self) -> None:
        """Ends the worker processes of chat templates and constraints, and the thread of long texts."""
        self._texts.close()
        await self._constraints.close()
        await self.templates.close()

    async def _version(
        self, request: inference_pb2.GenerateRequest, identity: Identity, sticky_key: str
    ) -> Version | None:
        """None for the base model. A resumed stream goes on with the version it began with, though that may
        take no new requests any more: it was accepted before, here or by a scheduler that is gone."""
        resumed_digest = request.resume.adapter_digest
        if not request.HasField("adapter"):
            if resumed_digest:
                raise InvalidRequest("resume.adapter_digest", "is set, but the request is for the base model")
            return None
        ref = parse_ref(request.adapter, identity)
        if request.HasField("resume"):
            ref = _resumed_ref(ref, resumed_digest)
        resumed = request.HasField("resume")
        return await self._find(ref, identity, request.adapter, sticky_key, resumed=resumed)

    async def _find(
        self, ref: Ref, identity: Identity, text: str, sticky_key: str | None, *, resumed: bool = False
    ) -> Version:
        """From memory without leaving the event loop, if it can be."""
        known_version = partial(self._versions.known, sticky_key=sticky_key, resumed=resumed)
        resolve = partial(self._versions.resolve, sticky_key=sticky_key, resumed=resumed)

        def known(ref: Ref) -> Version | None:
            return known_version(ref) if identity.sees(ref.tenant, ref.name) else None

        def find() -> Version:
            return find_version(resolve, ref, identity, text)

        version = find_version(known, ref, identity, text)
        if version is None:
            version = await asyncio.get_running_loop().run_in_executor(self._pool, find)
        self._check_fits(version)
        return version

    async def _still_takes(self, version: Version, *, resumed: bool) -> bool:
        """Templates and tokenizers take their time: what was ACTIVE may have been withdrawn meanwhile."""
        ref = Ref(version.tenant, version.name, digest=version.digest)
        try:
            for _ in range(MAX_LOOKS):
                if self._versions.takes(ref, resumed=resumed):
                    return True
                resolve = partial(self._versions.resolve, ref, resumed=resumed)
                await asyncio.get_running_loop().run_in_executor(self._pool, resolve)
        except adapter_store.AdapterNotFound:
            return False
        raise StoreUnavailable("others keep changing this adapter")

    def _check_fits(self, version: Version) -> None:
        """Once for each content. Raises IncompatibleAdapter."""
        if version.digest not in self._fitting:
            check_fits(version, self._spec)
            if len(self._fitting) >= MAX_FITTING:
                self._fitting.clear()
            self._fitting.add(version.digest)

    async def _masks(self, request: inference_pb2.GenerateRequest, tenant: str) -> Masks:
        constraint = None
        if request.HasField("constraint"):
            await self._constraints.check(request.constraint, tenant=tenant, key=request.request_id)
            constraint = common_pb2.Constraint()
            constraint.CopyFrom(request.constraint)  # A part of a message keeps all of it in memory.
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        words = bad_word_tokens(request.bad_words, encode)
        return Masks(constraint, tuple(request.allowed_token_ids), tuple(words))

    async def _prompt(
        self,
        request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest,
        version: Version | None,
        tenant: str,
    ) -> tuple[int, ...]:
        key = request.request_id if isinstance(request, inference_pb2.GenerateRequest) else ""
        if isinstance(request, inference_pb2.GenerateRequest) and request.HasField("token_ids"):
            ids: Sequence[int] = request.token_ids.ids
        elif request.HasField("chat"):
            messages = [
                {"role": message.role, "content": message.content} for message in request.chat.messages
            ]
            template, tokens = None, dict[str, str]()
            if version is not None:
                template, tokens = version.manifest.chat_template, dict(version.manifest.text.special_tokens)
            text = await self.templates.render(messages, template, tokens, tenant=tenant, key=key)
            ids = await self._encode(text, tenant, key, special=False)
        else:
            ids = await self._encode(request.text, tenant, key, special=True)
        if not ids:
            raise InvalidRequest("prompt", "has no tokens; at least one is needed")
        if len(ids) >= self.max_model_len:
            raise self._too_long(f"has {len(ids)} tokens")
        prompt = tuple(ids)
        validation.check_token_ids(prompt, self._spec.vocab_size, "token_ids.ids")
        return prompt

    async def _encode(self, text: str, tenant: str, key: str, *, special: bool) -> list[int]:
        """A text that cannot fit is refused before it costs anything."""
        if not self._tokenizer.may_have_fewer(text, self.max_model_len):
            raise self._too_long(f"has {len(text)} characters")
        encode = self._tokenizer.encode
        work = partial(encode, text, add_special_tokens=special)
        return await self._texts.run(len(text), work, tenant, key)

    def _too_long(self, has: str) -> InvalidRequest:
        limit = self.max_model_len
        return InvalidRequest(
            "prompt", f"{has}; the model takes {limit} tokens for prompt and answer together"
        )

    async def _echo_text(
        self, request: inference_pb2.GenerateRequest, prompt: Sequence[int], tenant: str
    ) -> str:
        """Nothing after a resumption, whose text has begun already."""
        if not request.response.echo or request.HasField("resume"):
            return ""
        text = request.text
        if not request.HasField("text"):
            work = partial(self._text_of, prompt)
            text = await self._texts.run(len(prompt), work, tenant, request.request_id)
        validation.check_echo(text)
        return text

    def _text_of(self, prompt: Sequence[int]) -> str:
        """A character that the prompt leaves unfinished comes later, with the token that completes it."""
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token_id in prompt[-PROMPT_TAIL:]:
            utf8.decode(self._tokenizer.token_bytes(token_id))
        text = self._tokenizer.decode(prompt)
        return text.removesuffix("\ufffd") if utf8.getstate()[0] else text


def _resumed_ref(ref: Ref, digest: str) -> Ref:
    if not digest:
        raise InvalidRequest(
            "resume.adapter_digest", "is missing: take it from the lost stream's first chunk"
        )
    if ref.digest is not None and ref.digest != digest:
        raise InvalidRequest("resume.adapter_digest", "is not the digest in adapter")
    try:
        return Ref(ref.tenant, ref.name, digest=digest)
    except InvalidRef as error:
        raise InvalidRequest("resume.adapter_digest", str(error)) from error


def _copied(options: inference_pb2.ResponseOptions) -> inference_pb2.ResponseOptions:
    """A part of a message keeps all of it in memory."""
    copied = inference_pb2.ResponseOptions()
    copied.CopyFrom(options)
    return copied


def _with_seed(request: inference_pb2.GenerateRequest) -> common_pb2.Sampling:
    sampling = common_pb2.Sampling()
    sampling.CopyFrom(request.sampling)
    if request.HasField("resume"):
        sampling.seed = request.resume.seed
    elif not sampling.HasField("seed"):
        sampling.seed = secrets.randbits(64)
    return sampling


def _cache_salt(tenant: str, client_salt: str) -> bytes:
    """A tenant's name has no NUL, so no two pairs give the same bytes."""
    return hashlib.sha256(tenant.encode() + b"\0" + client_salt.encode()).digest()


def _session(cache_salt: bytes, digest: str, session_id: str) -> str:
    """Turns share a prefix only with one version and one salt, which is its tenant's."""
    if not session_id:
        return ""
    return hashlib.sha256(cache_salt + digest.encode() + b"\0" + session_id.encode()).hexdigest()[:32]
