"""Certificates, tokens and keys of JSON web tokens change under streams with known answers: none may break.

`make rotation` does it under 200 streams and writes what it saw; tests/faults/test_rotation.py under a few.
The services are those of a locked fleet: mutual TLS on both ports. A third of the streams says who calls by a
bearer token, one by a JSON web token, one by its client's certificate. Streams and calls are plain gRPC: no
client of ours is there that would take up a broken one again.
"""

import argparse
import asyncio
import hashlib
import itertools
import ssl
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc

from executor.bench.paced import paced_token
from lorafleet.bench.results import Results, head
from lorafleet.tls.credentials import channel_credentials
from lorafleet.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.support.adapters.peft import make_base
from tests.support.adapters.tokenizers import byte_level, write_folder
from tests.support.services.certificates import make_certificates
from tests.support.services.cluster import PATIENCE_S, Cluster, Node
from tests.support.services.web_tokens import AUDIENCE, ISSUER, Signer, jwk_set

WHATS = ("certificates", "tokens", "keys")
PROMPT = (7, 8)
AFTER = 10  # Tokens that each stream has to bring after a rotation.
MAX_TOKENS = 4000  # Never reached: streams are ended when all rotations are done.
PER_CONNECTION = 64  # Streams; a scheduler takes 100.
_APART = [("grpc.use_local_subchannel_pool", 1)]
_HOUR_S = 3600.0
_RIGHTS = 'tenant = "acme"\nrights = ["infer"]\n'
_FAILED = "lorafleet_scheduler_failed_attempts_total"

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Seen:
    """One rotation under `streams`.

    went_on   streams with the right tokens before it, and AFTER of them after it
    problems  what others ended with, or had instead: must be empty
    faults    what a new call got instead of what it should: must be empty
    lost      attempts that executors lost since all streams began: must be 0
    """

    what: str
    streams: int
    went_on: int
    problems: dict[str, int]
    faults: list[str]
    lost: int
    seconds: float

    @property
    def is_whole(self) -> bool:
        return (self.went_on, self.faults, self.lost) == (self.streams, [], 0)


class Scene:
    """A locked scheduler, and an executor that only sleeps."""

    def __init__(self, cluster: Cluster, streams: int, step_ms: float) -> None:
        self._folder = cluster.folder
        self._made = made = make_certificates(cluster.folder / "certificates")
        for name in ("front", "inner"):
            made.authority.issue(name, ["localhost", "127.0.0.1"], server=True, days=1)
        made.authority.issue("scheduler", ["scheduler"], server=False, days=1)
        self._token, self._signer = "token-0", Signer("key-0")
        self._numbers = itertools.count(1)
        self._write_tokens(self._token)
        self._write_keys(self._signer)
        seats = ("--max-seats", str(streams + 8), "--max-loras", "2", "--max-lora-rank", "8")
        self._executor = cluster.executor("rotated-executor", *seats, *made.flags("inner", ca="ca"))
        self._executor.program = "executor.bench.paced"
        self._executor.environment["STEP_MS"] = str(step_ms)
        jwt = ("--jwt-keys-file", str(self._keys), "--jwt-issuer", ISSUER, "--jwt-audience", AUDIENCE)
        self._scheduler = cluster.scheduler(
            "rotated-scheduler",
            [self._executor],
            *("--tokens-file", str(self._tokens), *jwt),
            *(*made.flags("front", ca="ca"), *made.flags("scheduler", prefix="executor", ca="ca")),
        )

    def start(self) -> None:
        for node in (self._executor, self._scheduler):
            node.start()
        for node in (self._executor, self._scheduler):
            node.wait_ready()

    @property
    def _tokens(self) -> Path:
        return self._folder / "rotated-tokens.toml"

    @property
    def _keys(self) -> Path:
        return self._folder / "rotated-keys.json"

    def _write_tokens(self, token: str) -> None:
        sha256 = hashlib.sha256(token.encode()).hexdigest()
        entries = f'[[tokens]]\nsha256 = "{sha256}"\n{_RIGHTS}[[certificates]]\nsan = "client"\n{_RIGHTS}'
        _replace(self._tokens, entries)

    def _write_keys(self, signer: Signer) -> None:
        _replace(self._keys, jwk_set(signer))

    def _callers(self) -> Iterator[Metadata]:
        """Metadata of one caller after the other, as those are known now."""
        web_token = self._signer.token(time.time() + _HOUR_S, tenant="acme", rights=["infer"])
        return itertools.cycle((_bearer(self._token), _bearer(web_token), ()))

    async def run(self, streams: int, whats: Sequence[str]) -> list[Seen]:
        """One rotation after the other, under the same streams."""
        async with AsyncExitStack() as stack:
            channels = range(-(-streams // PER_CONNECTION))
            stubs = itertools.cycle([await stack.enter_async_context(self._stub()) for _ in channels])
            callers = itertools.islice(self._callers(), streams)
            reading = [Stream(stub, each) for stub, each in zip(stubs, callers, strict=False)]
            await asyncio.gather(*(each.more(1) for each in reading))
            seen = [await self._rotate(what, reading) for what in whats]
            for each in reading:
                await each.end()
        return seen

    async def _rotate(self, what: str, streams: Sequence["Stream"]) -> Seen:
        began = time.monotonic()
        rotations = {"certificates": self._new_certificates, "tokens": self._new_token, "keys": self._new_key}
        faults = await rotations[what]()
        await asyncio.gather(*(each.more(AFTER) for each in streams))
        problems = Counter(each.problem for each in streams if each.problem)
        return Seen(
            what,
            streams=len(streams),
            went_on=len(streams) - problems.total(),
            problems=dict(problems),
            faults=faults,
            lost=await asyncio.to_thread(_lost, self._scheduler),
            seconds=round(time.monotonic() - began, 1),
        )

    async def _new_certificates(self) -> list[str]:
        """Of both services, of the scheduler as a client, and of the clients."""
        nodes = {"front": self._scheduler, "inner": self._executor}
        old = [await _shown(node) for node in nodes.values()]
        for name in (*nodes, "scheduler", "client"):
            self._made.authority.renew(name, 1)
        new = [await _shown(node) for node in nodes.values()]
        files = [(self._made.folder / f"{name}.crt").read_text() for name in nodes]
        shown = zip(nodes, old, new, files, strict=True)
        told = [f"{name} still shows the old one" for name, a, b, file in shown if b != file or b == a]
        return told + await self._calls({"new certificate": ((), "OK")})

    async def _new_token(self) -> list[str]:
        """A file that is half written comes first: it changes nothing."""
        old = self._token
        _replace(self._tokens, self._tokens.read_text()[:40])
        told = await self._calls({"token, in a broken file": (_bearer(old), "OK")})
        self._token = f"token-{next(self._numbers)}"
        self._write_tokens(self._token)
        return told + await self._calls(
            {
                "new token": (_bearer(self._token), "OK"),
                "old token": (_bearer(old), "UNAUTHENTICATED"),
            }
        )

    async def _new_key(self) -> list[str]:
        """The same of the keys of an identity provider."""
        old, end = self._signer, time.time() + _HOUR_S
        claims = {"tenant": "acme", "rights": ["infer"]}
        _replace(self._keys, self._keys.read_text()[:40])
        told = await self._calls({"key, in a broken file": (_bearer(old.token(end, **claims)), "OK")})
        self._signer = Signer(f"key-{next(self._numbers)}")
        self._write_keys(self._signer)
        return told + await self._calls(
            {
                "new key": (_bearer(self._signer.token(end, **claims)), "OK"),
                "old key": (_bearer(old.token(end, **claims)), "UNAUTHENTICATED"),
            }
        )

    async def _calls(self, cases: dict[str, tuple[Metadata, str]]) -> list[str]:
        """What calls on a new connection ended with, where it is not what they should."""
        told = []
        async with self._stub() as stub:
            for name, (metadata, wanted) in cases.items():
                try:
                    await stub.Generate(_request(1), metadata=metadata, timeout=PATIENCE_S)
                    got = "OK"
                except grpc.aio.AioRpcError as error:
                    got = error.code().name
                if got != wanted:
                    told.append(f"{name}: {got} in place of {wanted}")
        return told

    @asynccontextmanager
    async def _stub(self) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
        """On a connection of its own, with what the client's files hold now."""
        credentials = channel_credentials(self._made.tls("client"))
        async with grpc.aio.secure_channel(self._scheduler.address, credentials, options=_APART) as channel:
            yield inference_pb2_grpc.InferenceStub(channel)


class Stream:
    """One of them; it is read all the time. `problem` says what is wrong with it, as soon as something is."""

    def __init__(self, stub: inference_pb2_grpc.InferenceStub, metadata: Metadata) -> None:
        self.problem = ""
        self._found = 0
        self._news = asyncio.Event()
        self._call = stub.GenerateStream(_request(MAX_TOKENS), metadata=metadata)
        self._reading = asyncio.create_task(self._read())

    async def more(self, tokens: int) -> None:
        """Until it has brought so many from now on, or has a problem."""
        wanted = self._found + tokens
        try:
            async with asyncio.timeout(PATIENCE_S):
                while self._found < wanted and not self.problem:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            self.problem = "stands still"

    async def end(self) -> None:
        self._call.cancel()
        await asyncio.wait([self._reading])

    async def _read(self) -> None:
        try:
            async for chunk in self._call:
                for token in chunk.token_ids:
                    if token != paced_token(PROMPT, self._found):
                        self.problem = "another answer"
                    self._found += 1
                self._news.set()
            self.problem = self.problem or "ended"
        except grpc.aio.AioRpcError as error:
            self.problem = f"{error.code().name}: {error.details()}"
        self._news.set()


def _request(tokens: int) -> inference_pb2.GenerateRequest:
    stopping = common_pb2.Stopping(max_new_tokens=tokens, ignore_eos=True)
    return inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=PROMPT), stopping=stopping)


def _bearer(token: str) -> Metadata:
    return (("authorization", f"Bearer {token}"),)


def _replace(file: Path, text: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


async def _shown(node: Node) -> str:
    """The certificate that a new connection is shown, which needs none of the client's."""
    host, _, port = node.address.rpartition(":")
    return await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)), timeout=20)


def _lost(scheduler: Node) -> int:
    metrics = scheduler.metrics()
    return int(sum(metrics[name] for name in metrics if name.startswith(_FAILED)))


async def run(cluster: Cluster, streams: int, step_ms: float, whats: Sequence[str] = WHATS) -> list[Seen]:
    scene = Scene(cluster, streams, step_ms)
    await asyncio.to_thread(scene.start)
    return await scene.run(streams, whats)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.chaos.rotation", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where results go")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=200)
    args = parser.parse_args()
    said = head("python -m tests.support.chaos.rotation")
    with tempfile.TemporaryDirectory() as folder:
        model = make_base(Path(folder) / "model", vocab_size=448, max_position_embeddings=4096)
        write_folder(model, byte_level())
        with Cluster(model, Path(folder)) as cluster:
            seen = asyncio.run(run(cluster, args.streams, args.step_ms))
    results = Results(args.json, {**said, "step_ms": args.step_ms})
    for each in seen:
        results.add(asdict(each))
    sys.exit(not all(each.is_whole for each in seen))


if __name__ == "__main__":
    main()
