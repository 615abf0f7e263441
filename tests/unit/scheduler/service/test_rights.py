"""Every RPC of every service, for every kind of caller, on own, others' and absent adapters.

The RPCs are found in the services' descriptors: a new one needs an entry in RPCS, and a place in the table of
scheduler/README.md.
"""

import hashlib
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from adapter_store import ModelSpec, open_store
from lorafleet.tls.authority import Authority
from lorafleet.v1 import adapters_pb2 as ad
from lorafleet.v1 import fleet_pb2 as fl
from lorafleet.v1 import inference_pb2 as inf
from scheduler.app import SERVICES, Scheduler
from scheduler.audit import CHANGES
from tests.support.adapters.served_model import write_adapter, write_model
from tests.support.services.scheduler_house import House, generate, open_house
from tests.support.services.web_tokens import AUDIENCE, ISSUER, Signer, jwk_set

RIGHTS = ("infer", "push", "manage", "operate")
OWN, ABSENT, OTHERS, OTHERS_ABSENT = "acme/own", "acme/absent", "rival/secret", "rival/absent"
REFUSALS = frozenset({"UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND"})
LET_IN = frozenset({"OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "ABORTED"})
WEB, SERVER = "spiffe://example.org/web", "scheduler.example.org"


@dataclass(frozen=True)
class Rpc:
    """What it needs, and a request for an adapter that changes nothing, or what the next rows mend.

    `names`: it is about a name, whether that is there or not. `lists`: what is not seen is left out.
    `bare`: it is about no adapter.
    """

    right: str | None
    request: Callable[[str], Any]
    names: bool = False
    lists: bool = False
    bare: bool = False


def text(adapter: str) -> inf.GenerateRequest:
    return generate(adapter=adapter, max_new_tokens=1)


RPCS: Mapping[str, tuple[Rpc, ...]] = {
    "Inference/Generate": (Rpc("infer", text), Rpc("infer", lambda _: generate(max_new_tokens=1), bare=True)),
    "Inference/GenerateStream": (Rpc("infer", text),),
    "Inference/Tokenize": (
        Rpc("infer", lambda adapter: inf.TokenizeRequest(adapter=adapter, text="x")),
        Rpc("infer", lambda _: inf.TokenizeRequest(text="x"), bare=True),
    ),
    "Inference/ListModels": (Rpc(None, lambda _: inf.ListModelsRequest(), lists=True),),
    "Adapters/Push": (Rpc("push", lambda a: ad.PushRequest(header=ad.PushHeader(adapter=a)), names=True),),
    "Adapters/Pull": (Rpc("push", lambda a: ad.PullRequest(adapter=a)),),
    "Adapters/Get": (Rpc(None, lambda a: ad.GetAdapterRequest(adapter=a)),),
    "Adapters/List": (
        Rpc(None, lambda a: ad.ListAdaptersRequest(**tenant_and_name(a)), lists=True),
        Rpc(None, lambda a: ad.ListAdaptersRequest(tenant=tenant_and_name(a)["tenant"]), lists=True),
    ),
    "Adapters/ListAliases": (Rpc(None, lambda a: ad.ListAliasesRequest(**tenant_and_name(a)), lists=True),),
    "Adapters/Delete": (Rpc("manage", lambda a: ad.DeleteAdapterRequest(adapter=f"{a}@v1")),),  # in use
    "Adapters/SetAlias": (
        Rpc("manage", lambda a: ad.SetAliasRequest(adapter=f"{a}@spare", target="latest")),
    ),
    "Adapters/DeleteAlias": (Rpc("manage", lambda a: ad.DeleteAliasRequest(adapter=f"{a}@spare")),),
    "Adapters/Protect": (Rpc("manage", lambda a: ad.ProtectRequest(adapter=a)),),
    "Adapters/Unprotect": (Rpc("manage", lambda a: ad.UnprotectRequest(adapter=a)),),
    "Adapters/Pin": (Rpc("manage", lambda a: ad.PinRequest(adapter=a)),),  # of no tier
    "Adapters/Unpin": (Rpc("manage", lambda a: ad.UnpinRequest(adapter=a)),),
    "Adapters/Drop": (Rpc("manage", lambda a: ad.DropCopiesRequest(adapter=a, executors=["x:1"])),),
    "Adapters/Drain": (Rpc("manage", lambda a: ad.DrainAdapterRequest(adapter=a)),),
    "Adapters/Activate": (Rpc("manage", lambda a: ad.ActivateRequest(adapter=a)),),
    "Adapters/DeleteDamaged": (
        Rpc("manage", lambda a: ad.DeleteDamagedRequest(adapter=a, dry_run=True), names=True),
    ),
    "Adapters/Verify": (
        Rpc("operate", lambda a: ad.VerifyRequest(adapter=a)),
        Rpc("operate", lambda _: ad.VerifyRequest(), bare=True),
    ),
    "Adapters/Collect": (Rpc("operate", lambda _: ad.CollectRequest(dry_run=True), bare=True),),
    "Adapters/Residency": (
        Rpc("manage", lambda a: ad.ResidencyRequest(adapter=a)),
        Rpc("manage", lambda _: ad.ResidencyRequest(), bare=True),
    ),
    "Fleet/Watch": (Rpc("operate", lambda _: fl.WatchFleetRequest(), bare=True),),
    "Fleet/Cordon": (Rpc("operate", lambda _: fl.CordonRequest(address="x:1"), bare=True),),
    "Fleet/Drain": (Rpc("operate", lambda _: fl.DrainExecutorRequest(address="x:1"), bare=True),),
}
METHODS = {f"{service.name}/{method.name}": method for service in SERVICES for method in service.methods}


def tenant_and_name(adapter: str) -> dict[str, str]:
    tenant, _, name = adapter.partition("/")
    return {"tenant": tenant, "name": name}


class Caller(NamedTuple):
    """None as rights is nobody."""

    tenant: str
    rights: frozenset[str] | None
    channel: grpc.aio.Channel
    metadata: tuple[tuple[str, str], ...] = ()


class Outcome(NamedTuple):
    code: str
    text: str  # All that a caller learns, the adapter left out.
    answer: bytes


async def outcome(caller: Caller, name: str, request: Any, adapter: str) -> Outcome:
    method = METHODS[name]
    kind = f"{'stream' if method.client_streaming else 'unary'}_"
    kind += "stream" if method.server_streaming else "unary"
    answer_type = GetMessageClass(method.output_type)
    path = f"/{method.containing_service.full_name}/{method.name}"
    stub = getattr(caller.channel, kind)(path, type(request).SerializeToString, answer_type.FromString)
    call = stub(iter([request]) if method.client_streaming else request, metadata=caller.metadata)
    try:
        if not method.server_streaming:
            return Outcome("OK", "", (await call).SerializeToString())
        first = await call.read()
        if first is not grpc.aio.EOF:
            call.cancel()
            return Outcome("OK", "", first.SerializeToString())
        await call
        return Outcome("OK", "", b"")
    except grpc.aio.AioRpcError as error:
        status, info = rpc_status.from_call(error), error_details_pb2.ErrorInfo()
        assert status is not None and status.details[0].Unpack(info)
        told = f"{error.code().name} {info.reason} {error.details()} {sorted(info.metadata.items())}"
        return Outcome(error.code().name, told.replace(adapter, "NAME"), b"")


def expected(rpc: Rpc, caller: Caller, adapter: str) -> set[str]:
    """Which statuses are right; "let in" is one that only who has the right gets."""
    if caller.rights is None:
        return {"UNAUTHENTICATED"}
    allowed = rpc.right is None or rpc.right in caller.rights
    sees = adapter.startswith(caller.tenant + "/")
    if rpc.lists:
        return {"OK"}
    if not rpc.bare and not sees:
        return {"NOT_FOUND"}
    if not rpc.bare and adapter in (ABSENT, OTHERS_ABSENT):
        if rpc.names:
            return {"let in", "NOT_FOUND"} if allowed else {"PERMISSION_DENIED"}
        return {"NOT_FOUND"}
    return {"let in"} if allowed else {"PERMISSION_DENIED"}


def tokens_file(names: Mapping[str, tuple[str, tuple[str, ...]]]) -> str:
    entries = []
    for name, (tenant, rights) in names.items():
        hashed, listed = hashlib.sha256(name.encode()).hexdigest(), ", ".join(f'"{r}"' for r in rights)
        entries.append(f'[[tokens]]\nsha256 = "{hashed}"\ntenant = "{tenant}"\nrights = [{listed}]\n')
    return "".join(entries) + f'[[certificates]]\nsan = "{WEB}"\ntenant = "acme"\nrights = ["infer"]\n'


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


TOKENS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "none": ("acme", ()),
    **{right: ("acme", (right,)) for right in RIGHTS if right != "manage"},
    "rival": ("rival", ("infer", "push", "operate")),
    "manage": ("acme", ("manage",)),  # Last, since it changes what others look at.
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With acme/own and rival/secret in the store beside it."""
    model = write_model(Path(tmp_path_factory.mktemp("rights")) / "base")
    store, spec = open_store(str(model.parent / "store")), ModelSpec.from_folder(model)
    for tenant, name, seed in (("acme", "own", 1), ("rival", "secret", 2)):
        version = store.put(write_adapter(model.parent / name, seed=seed), tenant, name, spec)
        for alias in ("latest", "v1", "spare"):
            store.set_alias(tenant, name, alias, version.digest)
    return model


class Doors(NamedTuple):
    house: House
    signer: Signer
    tokens: Path
    keys: Path
    port: int
    folder: Path  # with certificates


@pytest.fixture
async def doors(model: Path, tmp_path: Path) -> AsyncIterator[Doors]:
    """A scheduler that knows tokens, JSON web tokens and, on a port beside, certificates."""
    tokens, keys, signer = tmp_path / "tokens.toml", tmp_path / "jwks.json", Signer()
    authority = Authority.make(tmp_path, "ca", "a CA for tests", 2)
    authority.issue("server", [SERVER], server=True, days=1)
    authority.issue("known", [WEB], server=False, days=1)
    authority.issue("foreign", ["db.example.org"], server=False, days=1)
    tokens.write_text(tokens_file(TOKENS))
    keys.write_text(jwk_set(signer))
    ports: list[int] = []

    def serve_tls(scheduler: Scheduler) -> None:
        ca, *pair = pem(tmp_path, "server")
        credentials = grpc.ssl_server_credentials([tuple(pair)], ca, require_client_auth=True)
        ports.append(scheduler._server.add_secure_port("127.0.0.1:0", credentials))

    jwt = {"jwt_issuer": ISSUER, "jwt_audience": AUDIENCE, "jwt_keys_file": keys}
    async with open_house(model, before_start=serve_tls, tokens_file=tokens, **jwt) as house:
        house.fake.pages = True
        yield Doors(house, signer, tokens, keys, ports[0], tmp_path)


def pem(folder: Path, name: str) -> list[bytes]:
    """The CA's certificate, a key, and its certificate."""
    return [(folder / file).read_bytes() for file in ("ca.crt", f"{name}.key", f"{name}.crt")]


def with_certificate(doors: Doors, name: str) -> grpc.aio.Channel:
    credentials = grpc.ssl_channel_credentials(*pem(doors.folder, name))
    options = [("grpc.ssl_target_name_override", SERVER)]
    return grpc.aio.secure_channel(f"127.0.0.1:{doors.port}", credentials, options)


def callers(doors: Doors, tls: grpc.aio.Channel, foreign_tls: grpc.aio.Channel) -> dict[str, Caller]:
    def jwt(seconds: float, **claims: Any) -> tuple[tuple[str, str], ...]:
        claims = {"tenant": "acme", "rights": ["infer"], **claims}
        return bearer(doors.signer.token(time.time() + seconds, **claims))

    plain = doors.house.channel
    return {
        "nobody": Caller("", None, plain),
        "an unknown token": Caller("", None, plain, bearer("unknown")),
        "an expired JWT": Caller("", None, plain, jwt(-60)),
        "a foreign JWT": Caller("", None, plain, bearer(Signer().token(time.time() + 60, tenant="acme"))),
        "a JWT of another audience": Caller("", None, plain, jwt(60, aud="other")),
        "a foreign certificate": Caller("", None, foreign_tls),
        "a certificate and an unknown token": Caller("", None, tls, bearer("unknown")),
        "a certificate": Caller("acme", frozenset({"infer"}), tls),
        "a JWT": Caller("acme", frozenset({"infer"}), plain, jwt(60)),
        **{
            name: Caller(tenant, frozenset(rights), plain, bearer(name))
            for name, (tenant, rights) in TOKENS.items()
        },
    }


def test_every_rpc_has_its_right_here_and_in_the_readme() -> None:
    assert RPCS.keys() == METHODS.keys()
    readme = (Path(__file__).parents[4] / "scheduler/README.md").read_text()
    for name, rpcs in RPCS.items():
        (right,) = {rpc.right for rpc in rpcs}
        row = rf"^\| {f'`{right}`' if right else 'none'}[^|]*\|.*`{name.partition('/')[2]}`"
        assert re.search(row, readme, re.MULTILINE), f"{name} is not told to need {right}"
    assert {f"/{m.containing_service.full_name}/{m.name}" for m in METHODS.values()} >= CHANGES
    reads = {"Generate", "GenerateStream", "Tokenize", "Pull", "Get", "Residency", "Watch"}
    for name, method in METHODS.items():
        path = f"/{method.containing_service.full_name}/{method.name}"
        is_read = method.name in reads or method.name.startswith("List")
        assert is_read != (path in CHANGES), f"{name} is neither a change that is audited nor known to read"


async def test_the_matrix(doors: Doors) -> None:
    wrong, texts = [], dict[tuple[object, ...], set[str]]()
    async with with_certificate(doors, "known") as tls, with_certificate(doors, "foreign") as foreign:
        everybody = callers(doors, tls, foreign).items()
        cells = [
            (name, number, rpc, who, caller, adapter)
            for name, rpcs in RPCS.items()
            for who, caller in everybody
            for number, rpc in enumerate(rpcs)
            for adapter in (("",) if rpc.bare else (OTHERS, OTHERS_ABSENT, ABSENT, OWN))
        ]
        for name, number, rpc, who, caller, adapter in cells:
            found = await outcome(caller, name, rpc.request(adapter), adapter or "-")
            told = "let in" if found.code in LET_IN and not rpc.lists else found.code
            if told not in expected(rpc, caller, adapter):
                wrong.append(f"{name}[{number}] of {adapter!r} by {who}: {found.text or 'OK'}")
            if caller.tenant == "acme" and b"rival" in found.answer:
                wrong.append(f"{name}[{number}] tells {who} of another tenant")
            # One text for every wrong token, and one for what is hidden or absent.
            proof = (bool(caller.metadata), caller.channel) if caller.rights is None else None
            if found.code in REFUSALS:
                texts.setdefault((name, number, found.code, proof), set()).add(found.text)
    assert len(cells) > 1000
    assert not wrong, "\n".join(wrong)
    assert not [told for told in texts.values() if len(told) > 1]


async def test_refusals_are_counted_by_method_and_reason(doors: Doors) -> None:
    house = doors.house
    nobody = Caller("", None, house.channel)
    await outcome(nobody, "Fleet/Watch", fl.WatchFleetRequest(), "-")
    await outcome(
        nobody._replace(metadata=bearer("infer")), "Fleet/Cordon", fl.CordonRequest(address="x"), "-"
    )
    value = house.scheduler._registry.get_sample_value
    name = "lorafleet_scheduler_refusals_total"
    for code, reason, method in (
        ("UNAUTHENTICATED", "no_token", "/lorafleet.v1.Fleet/Watch"),
        ("PERMISSION_DENIED", "operate", "/lorafleet.v1.Fleet/Cordon"),
    ):
        assert value(name, {"code": code, "reason": reason, "method": method}) == 1
