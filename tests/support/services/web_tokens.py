"""Signed JSON web tokens and the JWK set that fits them, as an identity provider makes them."""

import base64
import json
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec

ISSUER, AUDIENCE = "https://id.example.org", "lorafleet"


class Signer:
    """One key with its id."""

    def __init__(self, kid: str = "one") -> None:
        self.kid = kid
        self.private = ec.generate_private_key(ec.SECP256R1())

    def jwk(self, **more: Any) -> dict[str, Any]:
        numbers = self.private.public_key().public_numbers()
        x, y = (_base64(number.to_bytes(32, "big")) for number in (numbers.x, numbers.y))
        return {"kty": "EC", "crv": "P-256", "x": x, "y": y, "kid": self.kid, "use": "sig", **more}

    def token(self, exp: float, *, header: dict[str, Any] | None = None, **claims: Any) -> str:
        """`claims` with None are left out."""
        defaults = {"iss": ISSUER, "aud": AUDIENCE, "exp": int(exp), "sub": "someone"}
        payload = {name: value for name, value in {**defaults, **claims}.items() if value is not None}
        return jwt.encode(payload, self.private, "ES256", {"kid": self.kid, **(header or {})})


def jwk_set(*signers: Signer) -> str:
    return json.dumps({"keys": [signer.jwk() for signer in signers]})


def _base64(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()
