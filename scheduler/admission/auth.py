"""Says who makes a call: by a bearer token, a JSON web token, or the certificate of its connection."""

import hashlib
import ssl
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import grpc

from scheduler.admission import token_file
from scheduler.admission.identity import EVERYONE, Identity
from scheduler.admission.json_web_tokens import JsonWebTokens, JwtSettings, WrongToken
from scheduler.errors import Unauthenticated
from scheduler.watched_file import WatchedFile

__all__ = ["Authenticator", "Identity"]

MAX_TOKEN_CHARS = 8192
_NAMES, _CERTIFICATE = "x509_subject_alternative_name", "x509_pem_cert"
_URIS, _HOSTS = "peer_uri", "peer_dns"  # Those of the names that are meant as such.


class Authenticator:
    """Maps calls to identities. Where nothing says who is known, every caller is EVERYONE.

    It is asked once a call, at the door: `audit.caller` tells it to what is behind that.
    """

    def __init__(self, tokens_file: Path | None = None, jwt: JwtSettings | None = None) -> None:
        """Raises InvalidFile."""
        self._file = WatchedFile(tokens_file, token_file.load) if tokens_file else None
        self._web_tokens = JsonWebTokens(jwt) if jwt else None
        self._asks = tokens_file is not None or jwt is not None

    def caller(self, context: grpc.aio.ServicerContext) -> Identity:
        """Who makes a call. A token decides, where there is one. Raises Unauthenticated."""
        if not self._asks:
            return EVERYONE
        metadata = context.invocation_metadata() or ()
        if not any(key == "authorization" for key, _ in metadata):
            peer = context.auth_context() or {}
            if peer.get(_NAMES):
                return self._of_certificate(_trusted_names(peer))
        return self.identify(metadata)

    def identify(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Identity:
        """Whose token it is. Raises Unauthenticated, with one text for every wrong token."""
        if not self._asks:
            return EVERYONE
        token = _bearer_token(metadata)
        if self._file is not None:
            # A look-up by hash: its time tells of the hash at most, which nobody can choose.
            found = self._file.read().tokens.get(hashlib.sha256(token.encode()).hexdigest())
            if found is not None:
                return found
        if self._web_tokens is None or token.count(".") != 2:
            raise _wrong("unknown_token")
        try:
            return self._web_tokens.identify(token)
        except WrongToken as wrong:
            raise _wrong(wrong.cause) from None

    def _of_certificate(self, names: Iterable[str]) -> Identity:
        """Of whom a certificate names. Two identities in one are none."""
        known = self._file.read().certificates if self._file else {}
        found = {known[name] for name in names if name in known}
        if len(found) != 1:
            cause = "ambiguous_certificate" if found else "unknown_certificate"
            raise Unauthenticated("the certificate is not known here, and there is no token", cause=cause)
        return found.pop()


def _trusted_names(peer: Mapping[str, Sequence[bytes]]) -> Iterator[str]:
    """URIs and hosts' names in a certificate, each as what it is: its CA may let others choose the rest.
    gRPC ends a name at its first NUL: what its CA has signed is another name then."""
    signed = ssl.PEM_cert_to_DER_cert(peer[_CERTIFICATE][0].decode("ascii"))
    for kind in (_URIS, _HOSTS):
        for name in peer.get(kind, ()):
            if (b"://" in name) == (kind == _URIS) and name + b"\0" not in signed:
                yield name.decode(errors="replace")


def _bearer_token(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    values = [value for key, value in metadata or () if key == "authorization"]
    if len(values) != 1 or not isinstance(values[0], str):
        text = 'send "authorization: Bearer <token>" once in the call\'s metadata'
        raise Unauthenticated(text, cause="malformed_token" if values else "no_token")
    scheme, _, token = values[0].partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        text = 'the authorization must be of the form "Bearer <token>"'
        raise Unauthenticated(text, cause="malformed_token")
    if len(token) > MAX_TOKEN_CHARS:
        raise _wrong("long_token")
    return token.strip()


def _wrong(cause: str) -> Unauthenticated:
    return Unauthenticated("the bearer token is not known here", cause=cause)
