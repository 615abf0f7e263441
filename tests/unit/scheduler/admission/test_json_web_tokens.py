"""JSON web tokens to identities: which are taken, and what is refused for which cause."""

import base64
import builtins
import hmac
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from scheduler.admission import json_web_tokens
from scheduler.admission.auth import Authenticator
from scheduler.admission.identity import INFER, PUSH
from scheduler.admission.json_web_tokens import JsonWebTokens, JwtSettings, WrongToken
from scheduler.errors import Unauthenticated
from scheduler.watched_file import InvalidFile
from tests.support.services.web_tokens import AUDIENCE, ISSUER, Signer, jwk_set

NOW = 1_000_000.0
CLAIMS: dict[str, Any] = {"tenant": "acme", "rights": ["infer"]}


def symmetric(claims: dict[str, Any], secret: str) -> str:
    """A library does not sign with what looks like a public key; who attacks does."""
    parts = [{"alg": "HS256", "typ": "JWT", "kid": "one"}, claims]
    text = b".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in parts)
    signature = hmac.digest(secret.encode(), text, "sha256")
    return (text + b"." + base64.urlsafe_b64encode(signature).rstrip(b"=")).decode()


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def signer() -> Signer:
    return Signer()


@pytest.fixture
def settings(tmp_path: Path, signer: Signer) -> JwtSettings:
    file = tmp_path / "jwks.json"
    file.write_text(jwk_set(signer))
    return JwtSettings(ISSUER, AUDIENCE, file)


def changed(settings: JwtSettings, **changes: Any) -> JwtSettings:
    fields = {name: getattr(settings, name) for name in JwtSettings.__slots__}
    return JwtSettings(**{**fields, **changes})


def cause(tokens: JsonWebTokens, token: str) -> str:
    with pytest.raises(WrongToken) as caught:
        tokens.identify(token)
    return caught.value.cause


def test_claims_give_tenant_rights_and_patterns(settings: JwtSettings, signer: Signer) -> None:
    tokens = JsonWebTokens(settings, Clock())
    one = tokens.identify(signer.token(NOW + 60, **CLAIMS))
    assert (one.tenant, one.rights, one.adapters) == ("acme", {INFER}, ("acme/*",))
    assert (one.kind, one.subject) == ("jwt", "someone")
    seen = signer.token(NOW + 60, tenant="acme", rights="push", adapters=["shared/x-*", "acme/*"])
    assert tokens.identify(seen).adapters == ("shared/x-*", "acme/*")


@pytest.mark.parametrize(
    ("changes", "claims"),
    [
        ({"rights_claim": "scope"}, {"scope": "lorafleet:infer openid lorafleet:push"}),
        (
            {"rights_claim": "realm_access.roles"},
            {"realm_access": {"roles": ["offline", "lorafleet:push", "lorafleet:infer"]}},
        ),
        (
            {"rights_claim": "https://acme.example/rights"},
            {"https://acme.example/rights": ["lorafleet:push", "lorafleet:infer"]},
        ),
    ],
)
def test_claims_as_identity_providers_write_them(
    settings: JwtSettings, signer: Signer, changes: dict[str, Any], claims: dict[str, Any]
) -> None:
    settings = changed(settings, tenant_claim="org", rights_prefix="lorafleet:", **changes)
    token = signer.token(NOW + 60, org="acme", **claims)
    identity = JsonWebTokens(settings, Clock()).identify(token)
    assert (identity.tenant, identity.rights) == ("acme", {INFER, PUSH})


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        ({"exp": NOW - 31}, "jwt_expired"),
        ({"nbf": NOW + 31}, "jwt_not_yet"),
        ({"iat": NOW + 31}, "jwt_not_yet"),
        ({"iss": "https://evil.example"}, "jwt_foreign"),
        ({"aud": "another"}, "jwt_foreign"),
        ({"exp": None}, "jwt_claims"),
        ({"iss": None}, "jwt_claims"),
        ({"aud": None}, "jwt_claims"),
        ({"exp": "tomorrow"}, "jwt_claims"),
        ({"exp": 1e300}, "jwt_claims"),
        ({"nbf": True}, "jwt_claims"),
        ({"tenant": None}, "jwt_claims"),
        ({"tenant": "Acme/../x"}, "jwt_claims"),
        ({"tenant": ["acme"]}, "jwt_claims"),
        ({"rights": None}, "jwt_claims"),
        ({"rights": ["root"]}, "jwt_claims"),
        ({"rights": ["admin"]}, "jwt_claims"),
        ({"rights": [1]}, "jwt_claims"),
        ({"adapters": ["acme"]}, "jwt_claims"),
        ({"adapters": {"a": "b"}}, "jwt_claims"),
    ],
)
def test_wrong_claims_are_nobodys(
    settings: JwtSettings, signer: Signer, claims: dict[str, Any], expected: str
) -> None:
    payload = {"iss": ISSUER, "aud": AUDIENCE, "exp": NOW + 60, **CLAIMS, **claims}
    payload = {name: value for name, value in payload.items() if value is not None}
    # jwt.encode looks at types; what others sign need not.
    token = jwt.PyJWS().encode(json.dumps(payload).encode(), signer.private, "ES256", {"kid": signer.kid})
    assert cause(JsonWebTokens(settings, Clock()), token) == expected


def test_wrong_signatures_are_nobodys(settings: JwtSettings, signer: Signer) -> None:
    tokens = JsonWebTokens(settings, Clock())
    good = signer.token(NOW + 60, **CLAIMS)
    head, body, signature = good.split(".")
    claims = {"iss": ISSUER, "aud": AUDIENCE, "exp": NOW + 60, **CLAIMS}
    public = jwt.algorithms.ECAlgorithm.to_jwk(signer.private.public_key())  # as a symmetric secret
    assert cause(tokens, Signer().token(NOW + 60, **CLAIMS)) == "jwt_signature"
    assert cause(tokens, Signer("two").token(NOW + 60, **CLAIMS)) == "jwt_unknown_key"
    assert cause(tokens, f"{head}.{body}.") == "jwt_signature"
    assert cause(tokens, jwt.encode(claims, None, "none", {"kid": "one"})) == "jwt_malformed"
    assert cause(tokens, symmetric(claims, public)) == "jwt_malformed"
    assert cause(tokens, f"{head}.{body}.{signature}!") == "jwt_malformed"
    deep = base64.urlsafe_b64encode(b"[" * 6000).decode()
    for junk in (
        "..",
        f"{deep}.e30.e30",
        "a.b.c",
        "e30.e30.e30",
        f"{base64.b64encode(b'[1]').decode()}.e30.e30",
    ):
        assert cause(tokens, junk) == "jwt_malformed"


def test_a_token_is_verified_once_until_it_expires(
    settings: JwtSettings, signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, looks = Clock(), list[str]()
    tokens = JsonWebTokens(settings, clock)
    decode = jwt.decode
    monkeypatch.setattr(jwt, "decode", lambda token, *a, **k: looks.append(token) or decode(token, *a, **k))
    token = signer.token(NOW + 60, **CLAIMS)
    for clock.now in (NOW, NOW + 1, NOW + 89):
        assert tokens.identify(token).tenant == "acme"
    assert len(looks) == 1
    clock.now = NOW + 90
    assert cause(tokens, token) == "jwt_expired"


def test_what_is_remembered_is_bounded(
    settings: JwtSettings, signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_web_tokens, "MAX_CACHED", 3)
    tokens = JsonWebTokens(settings, Clock())
    for number in range(9):
        tokens.identify(signer.token(NOW + 60, jti=str(number), **CLAIMS))
    assert len(tokens._verified) == 3


DEEP = '{"keys": ' + "[" * 100_000


@pytest.mark.parametrize("content", ["{", DEEP])
def test_keys_that_change_count_at_once_and_bad_ones_never(
    settings: JwtSettings, signer: Signer, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    tokens, second = JsonWebTokens(settings, Clock()), Signer("two")
    old, new = signer.token(NOW + 60, **CLAIMS), second.token(NOW + 60, **CLAIMS)
    assert tokens.identify(old)
    settings.keys_file.write_text(content)
    with caplog.at_level(logging.ERROR):
        assert tokens.identify(old) and tokens.identify(old)
    assert len(caplog.records) == 1
    (tmp_path / "new").write_text(jwk_set(second))
    os.replace(tmp_path / "new", settings.keys_file)
    assert tokens.identify(new)
    assert cause(tokens, old) == "jwt_unknown_key"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kty": "oct", "crv": "", "k": "c2VjcmV0"}, "kty"),
        ({"d": "c2VjcmV0"}, "private"),
        ({"alg": "HS256"}, "alg"),
        ({"alg": "ES384"}, "alg"),
        ({"x": "AA"}, "public key"),
        ({"use": "enc"}, "none that signs"),
        ({"kid": 1}, "kid"),
    ],
)
def test_a_wrong_key_is_refused_at_the_start(
    settings: JwtSettings, signer: Signer, change: dict[str, Any], named: str
) -> None:
    settings.keys_file.write_text(json.dumps({"keys": [signer.jwk(**change)]}))
    with pytest.raises(InvalidFile, match=named) as caught:
        JsonWebTokens(settings)
    assert "c2VjcmV0" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]", '{"keys": 1}', '{"keys": [1]}', '{"keys": []}', "{}", DEEP])
def test_a_file_that_is_no_key_set_is_refused(settings: JwtSettings, content: str) -> None:
    settings.keys_file.write_text(content)
    with pytest.raises(InvalidFile, match=r"jwks\.json"):
        JsonWebTokens(settings)


def test_a_short_rsa_key_is_refused(settings: JwtSettings) -> None:
    public = rsa.generate_private_key(65537, 1024).public_key()
    key = {"kid": "x", **jwt.algorithms.RSAAlgorithm.to_jwk(public, as_dict=True)}
    settings.keys_file.write_text(json.dumps({"keys": [key]}))
    with pytest.raises(InvalidFile, match="1024 bits"):
        JsonWebTokens(settings)


def test_without_the_extra_the_start_says_so(settings: JwtSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_jwt(name: str, *arguments: Any) -> Any:
        if name == "jwt":
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", no_jwt)
    with pytest.raises(InvalidFile, match=r"lorafleet\[jwt\]"):
        JsonWebTokens(settings)


def test_callers_learn_nothing_of_why(settings: JwtSettings, signer: Signer, tmp_path: Path) -> None:
    tokens_file = tmp_path / "tokens.toml"
    tokens_file.write_text(f'[[tokens]]\nsha256 = "{"0" * 64}"\ntenant = "ops"\nrights = []\n')
    authenticator = Authenticator(tokens_file, settings)
    good = signer.token(time.time() + 60, **CLAIMS)
    assert authenticator.identify([("authorization", f"Bearer {good}")]).tenant == "acme"
    found = []
    expired, forged = signer.token(1, **CLAIMS), Signer().token(time.time() + 60, **CLAIMS)
    for token in ("plain", expired, forged, "a.b.c", "x." * 9000):
        with pytest.raises(Unauthenticated) as caught:
            authenticator.identify([("authorization", f"Bearer {token}")])
        found.append((caught.value.message, caught.value.metadata))
        assert token not in caught.value.message
    assert found == found[:1] * len(found)
