"""Bearer tokens to identities."""

import hashlib
import logging
import os
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from lorafleet.tls.authority import Authority
from scheduler.admission.auth import Authenticator, Identity
from scheduler.admission.identity import INFER, MANAGE, PUSH, RIGHTS
from scheduler.errors import Unauthenticated
from scheduler.watched_file import InvalidFile


def entry(token: str, tenant: str, rights: str = '["infer"]', more: str = "") -> str:
    hashed = hashlib.sha256(token.encode()).hexdigest()
    return f'[[tokens]]\nsha256 = "{hashed}"\ntenant = "{tenant}"\nrights = {rights}\n{more}\n'


def certificate(san: str, rights: str = '["infer"]') -> str:
    return f'[[certificates]]\nsan = "{san}"\ntenant = "acme"\nrights = {rights}\n'


def bearer(token: str) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "test"), ("authorization", f"Bearer {token}")]


# Deeper than a parser goes, and a tenant deeper than repr does.
DEEP = "tokens = " + "[" * 100_000
DEEP_NAME = f'[[tokens]]\nsha256 = "{"0" * 64}"\nrights = []\n[tokens.tenant{".a" * 20_000}]\n'


def test_without_a_file_everybody_is_the_default_tenant_with_all_rights() -> None:
    identity = Authenticator().identify(())
    assert (identity.tenant, identity.rights) == ("default", RIGHTS)
    assert identity.sees("any", "thing")


def test_a_token_gives_its_tenant_rights_and_patterns(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(entry("one", "acme") + entry("two", "ops", '["manage"]', 'adapters = ["*/x-*"]'))
    authenticator = Authenticator(file)
    assert authenticator.identify(bearer("one")) == Identity("acme", frozenset({INFER}), ("acme/*",))
    assert authenticator.identify(bearer("two")) == Identity("ops", frozenset({MANAGE}), ("*/x-*",))


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        [],
        [("authorization", "Bearer wrong")],
        [("authorization", "Bearer ")],
        [("authorization", "Basic one")],
        [("authorization", "one")],
        [("authorization", b"Bearer one")],
        [("authorization", "Bearer one"), ("authorization", "Bearer one")],
    ],
)
def test_everything_else_is_nobody(tmp_path: Path, metadata: list[tuple[str, str | bytes]] | None) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(entry("one", "acme"))
    with pytest.raises(Unauthenticated):
        Authenticator(file).identify(metadata)


def test_admin_of_older_files_is_push_and_manage_and_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(entry("new", "acme") + entry("old", "acme", '["infer", "admin"]'))
    authenticator = Authenticator(file)
    assert authenticator.identify(bearer("old")).rights == {INFER, PUSH, MANAGE}
    (told,) = [record.getMessage() for record in caplog.records]
    assert "tokens[1]" in told and '["infer", "push", "manage"]' in told and '"operate"' in told


class Call:
    """What an Authenticator asks of a call."""

    def __init__(self, *sans: str, token: str = "") -> None:
        self._sans = tuple(san.encode() for san in sans)
        self._token = token

    def invocation_metadata(self) -> list[tuple[str, str | bytes]]:
        return bearer(self._token) if self._token else []

    def auth_context(self) -> dict[str, tuple[bytes, ...]]:
        pem = ssl.DER_cert_to_PEM_cert(b"".join(self._sans)).encode()
        peer: dict[str, tuple[bytes, ...]] = {
            "x509_subject_alternative_name": self._sans,
            "x509_pem_cert": (pem,),
        }
        peer["peer_uri"] = tuple(san for san in self._sans if b"://" in san)
        peer["peer_dns"] = tuple(san for san in self._sans if b"://" not in san)
        return peer if self._sans else {}


def test_a_certificate_is_an_identity_unless_there_is_a_token(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    web, other = "spiffe://acme/web", 'tenant = "other"'
    rival = certificate("db.example").replace('tenant = "acme"', other)
    file.write_text(entry("one", "ops") + certificate(web) + certificate("web.example") + rival)
    caller: Any = Authenticator(file).caller
    assert (caller(Call(web)).tenant, caller(Call(web)).kind, caller(Call(web)).subject) == (
        "acme",
        "certificate",
        web,
    )
    assert caller(Call(web, "web.example")).tenant == "acme"
    assert caller(Call(web, token="one")).tenant == "ops"
    for call, cause in (
        (Call(), "no_token"),
        (Call("stranger"), "unknown_certificate"),
        (Call(web + "/more"), "unknown_certificate"),
        (Call(web, "db.example"), "ambiguous_certificate"),
        (Call(web, token="wrong"), "unknown_token"),
    ):
        with pytest.raises(Unauthenticated) as caught:
            caller(call)
        assert caught.value.cause == cause


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        (x509.DNSName("web.example"), ""),
        (x509.UniformResourceIdentifier("spiffe://acme/web"), ""),
        (x509.DNSName("web.example\0.evil.example"), "unknown_certificate"),
        (x509.UniformResourceIdentifier("spiffe://acme/web\0/evil"), "unknown_certificate"),
        (x509.DNSName("spiffe://acme/web"), "unknown_certificate"),
        (x509.RFC822Name("web.example"), "unknown_certificate"),
    ],
)
async def test_a_name_in_a_certificate_counts_whole_and_as_what_it_is(
    name: x509.GeneralName, cause: str, tmp_path: Path
) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(certificate("spiffe://acme/web") + certificate("web.example"))
    authenticator, seen = Authenticator(file), list[str]()

    async def ask(_: object, context: grpc.aio.ServicerContext) -> bytes:
        try:
            seen.append(authenticator.caller(context).tenant)
        except Unauthenticated as error:
            seen.append(error.cause)
        return b""

    Authority.make(tmp_path, "ca", "ca", 1).issue("server", ["localhost"], server=True, days=1)
    ca, cert, key = client_of(tmp_path, name)
    pair = ((tmp_path / "server.key").read_bytes(), (tmp_path / "server.crt").read_bytes())
    server = grpc.aio.server()
    server.add_registered_method_handlers("a", {"B": grpc.unary_unary_rpc_method_handler(ask)})
    port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials([pair], ca, True))
    await server.start()
    credentials = grpc.ssl_channel_credentials(ca, key, cert)
    async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
        await channel.unary_unary("/a/B")(b"", timeout=20)
    await server.stop(None)
    assert seen == [cause or "acme"]


def client_of(folder: Path, name: x509.GeneralName) -> tuple[bytes, bytes, bytes]:
    """Of the CA in `folder`: its certificate, and a client's with this one name, and its key."""
    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    signer = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([name]), critical=True)
        .sign(signer, hashes.SHA256())
    )
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private = key.private_bytes(pem, form, serialization.NoEncryption())
    return (folder / "ca.crt").read_bytes(), cert.public_bytes(pem), private


def test_patterns_do_not_cross_the_slash() -> None:
    identity = Identity("acme", frozenset(), ("acme/*", "shared/legal-?"))
    assert identity.sees("acme", "x")
    assert identity.sees("shared", "legal-1")
    assert not identity.sees("shared", "legal-12")
    assert not identity.sees("acme2", "x")
    assert not Identity("a", frozenset(), ("a*/y",)).sees("acme", "x")


def test_what_visible_names_begin_with() -> None:
    adapters = ("acme/chat-*", "acme/chat-en", "acme/v[12]", "acm?/support", "zoo/*", "*/x?")
    identity = Identity("acme", frozenset(), adapters)
    assert identity.name_prefixes("acme") == ("chat-", "support", "v", "x")
    assert identity.name_prefixes("zoo") == ("",)
    assert identity.name_prefixes("other") == ("x",)
    assert Identity("acme", frozenset(), ("acme/*",)).name_prefixes("zoo") == ()


def test_a_changed_file_counts_at_once(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(entry("one", "acme"))
    authenticator = Authenticator(file)
    replacement = tmp_path / "new.toml"
    replacement.write_text(entry("two", "acme"))
    os.replace(replacement, file)
    assert authenticator.identify(bearer("two")).tenant == "acme"
    with pytest.raises(Unauthenticated):
        authenticator.identify(bearer("one"))


@pytest.mark.parametrize("content", ["[[tokens]\n", DEEP, DEEP_NAME])
def test_a_broken_change_keeps_the_tokens_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(entry("one", "acme"))
    authenticator = Authenticator(file)
    file.write_text(content)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert authenticator.identify(bearer("one")).tenant == "acme"
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("x = 1", "tokens"),
        ("", "tokens"),
        ("tokens = 1", r"\[\[tokens\]\]"),
        (
            entry("one", "acme") + entry("two", "acme") + entry("one", "ops"),
            r"tokens\[2\].sha256: .* entry 0",
        ),
        (certificate("db.acme.example") * 2, r"certificates\[1\].san: .* entry 0"),
        (certificate("Spiffe://acme/x"), r"certificates\[0\].san"),
        (certificate("x", '["admin"]'), r"certificates\[0\].rights"),
        ("[[tokens]]\ntenant = 'a'\nrights = []", r"tokens\[0\]"),
        (DEEP, r"tokens\.toml"),
        (DEEP_NAME, r"tokens\.toml"),
        (entry("one", "Acme"), "tenant"),
        (entry("one", "acme", '["root"]'), "rights"),
        (entry("one", "acme", '"infer"'), "rights"),
        (entry("one", "acme", more='adapters = ["acme"]'), "adapters"),
        (entry("one", "acme", more='token = "one"'), r"tokens\[0\]"),
        (entry("one", "acme").replace('sha256 = "', 'sha256 = "X'), "sha256"),
    ],
)
def test_a_wrong_file_is_refused_at_the_start(tmp_path: Path, content: str, named: str) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(content)
    with pytest.raises(InvalidFile, match=named):
        Authenticator(file)
