"""JSON web tokens of an identity provider as identities. Needs the extra `jwt`.

A token counts when one of the keys in a file (a JWK set, as providers publish it) has signed it, for this
issuer and this audience, and it has not expired. Symmetric algorithms and `none` are never taken, and a key
is used for the algorithms of its own kind only.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler.admission.identity import Identity, checked_identity
from scheduler.config import Config
from scheduler.watched_file import InvalidFile, WatchedFile

logger = logging.getLogger(__name__)

LEEWAY_S = 30.0  # What clocks may differ by.
MAX_CACHED = 4096
MAX_SUBJECT_CHARS = 128
MIN_RSA_BITS = 2048
# By the type of a key, and its curve where it has one.
ALGORITHMS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("RSA", ""): ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
}


class WrongToken(Exception):
    """`cause` is one of a few fixed words, for the audit log."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class JwtSettings:
    """Whose tokens are taken, for whom, and which claims say what.

    A claim is named by its key, or by a path with dots ("realm_access.roles"). Rights are those of the
    claim's values that begin with `rights_prefix`, without it; others there mean something to others.
    """

    issuer: str
    audience: str
    keys_file: Path
    tenant_claim: str = "tenant"
    rights_claim: str = "rights"
    rights_prefix: str = ""
    adapters_claim: str = "adapters"

    @classmethod
    def of(cls, config: Config) -> "JwtSettings | None":
        if config.jwt_keys_file is None:
            return None
        return cls(
            issuer=config.jwt_issuer,
            audience=config.jwt_audience,
            keys_file=config.jwt_keys_file,
            tenant_claim=config.jwt_tenant_claim,
            rights_claim=config.jwt_rights_claim,
            rights_prefix=config.jwt_rights_prefix,
            adapters_claim=config.jwt_adapters_claim,
        )


@dataclass(frozen=True, slots=True)
class _Key:
    public: Any
    algorithms: tuple[str, ...]


class JsonWebTokens:
    """Verifies tokens; a token that was is not verified again before it expires or the keys change."""

    def __init__(self, settings: JwtSettings, clock: Callable[[], float] = time.time) -> None:
        """Raises InvalidFile, also when the extra is not installed."""
        try:
            import jwt
        except ImportError:
            text = "jwt_keys_file: needs the extra jwt: pip install 'lorafleet[jwt]'"
            raise InvalidFile(text) from None
        self._jwt = jwt
        self._settings = settings
        self._clock = clock
        self._file = WatchedFile(settings.keys_file, _load_keys)
        self._keys = self._file.read()
        self._verified: dict[bytes, tuple[Identity, float]] = {}  # By hash, with their ends; oldest first.

    def identify(self, token: str) -> Identity:
        """Raises WrongToken."""
        keys = self._file.read()
        if keys is not self._keys:
            self._keys = keys
            self._verified.clear()
        name = hashlib.sha256(token.encode()).digest()
        if known := self._verified.get(name):
            if self._clock() < known[1]:
                return known[0]
            del self._verified[name]
        claims = self._claims(token)
        try:
            identity = self._identity(claims)
        except ValueError as error:
            logger.debug("a token's claims are no identity: %s", error)
            raise WrongToken("jwt_claims") from None
        if len(self._verified) >= MAX_CACHED:
            del self._verified[next(iter(self._verified))]
        self._verified[name] = identity, claims["exp"] + LEEWAY_S
        return identity

    def _claims(self, token: str) -> dict[str, Any]:
        """Of a token that is signed, current and meant for us."""
        jwt, settings = self._jwt, self._settings
        try:
            key = self._key(jwt.get_unverified_header(token))
            claims: dict[str, Any] = jwt.decode(
                token,
                key.public,
                algorithms=list(key.algorithms),
                issuer=settings.issuer,
                audience=settings.audience,
                leeway=LEEWAY_S,
                options={
                    "require": ["exp", "iss", "aud"],
                    # By our clock, below, so that a cached token and a new one end at the same moment.
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
        except (jwt.InvalidIssuerError, jwt.InvalidAudienceError):
            raise WrongToken("jwt_foreign") from None
        except jwt.MissingRequiredClaimError:
            raise WrongToken("jwt_claims") from None
        except jwt.InvalidSignatureError:
            raise WrongToken("jwt_signature") from None
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
            raise WrongToken("jwt_malformed") from None
        self._check_times(claims)
        return claims

    def _key(self, header: Mapping[str, Any]) -> _Key:
        """The one that the header names, or the only one."""
        kid = header.get("kid")
        if kid is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        if not isinstance(kid, str) or kid not in self._keys:
            raise WrongToken("jwt_unknown_key")
        return self._keys[kid]

    def _check_times(self, claims: Mapping[str, Any]) -> None:
        now = self._clock()
        times = {name: claims[name] for name in ("exp", "nbf", "iat") if name in claims}
        for value in times.values():
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e12:
                raise WrongToken("jwt_claims")
        if now >= times["exp"] + LEEWAY_S:
            raise WrongToken("jwt_expired")
        if any(now < times[name] - LEEWAY_S for name in ("nbf", "iat") if name in times):
            raise WrongToken("jwt_not_yet")

    def _identity(self, claims: Mapping[str, Any]) -> Identity:
        settings = self._settings
        rights = _words(_claim(claims, settings.rights_claim), settings.rights_claim)
        prefix = settings.rights_prefix
        granted = [each.removeprefix(prefix) for each in rights if each.startswith(prefix)]
        adapters = _claim(claims, settings.adapters_claim)
        patterns = None if adapters is None else _words(adapters, settings.adapters_claim)
        subject = str(claims.get("sub", ""))[:MAX_SUBJECT_CHARS]
        tenant = _claim(claims, settings.tenant_claim)
        return checked_identity(tenant, granted, patterns, kind="jwt", subject=subject)


def _claim(claims: Mapping[str, Any], name: str) -> object:
    """None when there is none. A whole key goes before a path: some providers' keys are URLs."""
    if name in claims:
        return claims[name]
    found: object = claims
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return found


def _words(value: object, claim: str) -> list[str]:
    """A list of strings, or one with spaces between, as `scope` has them."""
    words = value.split() if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"{claim}: needs a list of strings, or one string")
    return words


def _load_keys(file: Path) -> Mapping[str, _Key]:
    """Public signing keys by their id. Raises InvalidFile, which never tells what a key is."""
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))["keys"]
    except OSError as error:
        raise InvalidFile(f"{file}: {error}") from error
    except (ValueError, KeyError, TypeError):
        raise InvalidFile(f'{file}: is no JWK set: a JSON object with the list "keys"') from None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidFile(f"{file}: keys: needs a list of objects")
    keys: dict[str, _Key] = {}
    for index, entry in enumerate(entries):
        where = f"{file}: keys[{index}]"
        if entry.get("use", "sig") != "sig":
            continue  # Providers publish keys for encryption beside those that sign.
        kid = entry.get("kid", "")
        if not isinstance(kid, str) or (not kid and len(entries) > 1):
            raise InvalidFile(f"{where}.kid: needs a text, since there are several keys")
        if kid in keys:
            raise InvalidFile(f"{where}.kid: is the same as that of another key")
        keys[kid] = _load_key(entry, where)
    if not keys:
        raise InvalidFile(f"{file}: keys: has none that signs")
    return keys


def _load_key(entry: Mapping[str, Any], where: str) -> _Key:
    import jwt

    fitting = ALGORITHMS.get((str(entry.get("kty")), str(entry.get("crv", ""))))
    if fitting is None:
        raise InvalidFile(f"{where}: needs kty RSA, EC (P-256, P-384, P-521) or OKP (Ed25519)")
    if "d" in entry:
        raise InvalidFile(f"{where}.d: is a private key; write public ones only")
    algorithm = entry.get("alg")
    if algorithm is not None and algorithm not in fitting:
        raise InvalidFile(f"{where}.alg: is not one of {', '.join(fitting)}")
    try:
        public = jwt.PyJWK(dict(entry), algorithm or fitting[0]).key
    except (jwt.PyJWTError, ValueError, TypeError):
        raise InvalidFile(f"{where}: is no public key") from None
    if entry["kty"] == "RSA" and public.key_size < MIN_RSA_BITS:
        raise InvalidFile(f"{where}: has {public.key_size} bits; at least {MIN_RSA_BITS} are needed")
    return _Key(public, (algorithm,) if algorithm else fitting)
