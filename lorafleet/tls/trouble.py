"""Why no connection came about where TLS is why: gRPC tells some, a short probe the rest."""

import re
import socket
import ssl
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import unquote

import grpc

from lorafleet.tls.files import Tls

_PROBE_TIMEOUT_S = 2.0
_NOT_CONNECTED = "failed to connect to all addresses"
_ADDRESS = re.compile(r"last error: .*?(ipv[46]):(\S+?):(\d+): ")
_CONNECTED_AND_LOST = ("Socket closed", "reset by peer", "Broken pipe", "ndshake", "Hostname Verification")


class Trouble(StrEnum):
    SERVER_SPEAKS_TLS = "SERVER_SPEAKS_TLS"
    SERVER_SPEAKS_PLAINTEXT = "SERVER_SPEAKS_PLAINTEXT"
    UNKNOWN_CA = "UNKNOWN_CA"
    EXPIRED = "EXPIRED"
    NOT_YET_VALID = "NOT_YET_VALID"
    WRONG_NAME = "WRONG_NAME"
    NO_CLIENT_CERTIFICATE = "NO_CLIENT_CERTIFICATE"
    CLIENT_CERTIFICATE_REFUSED = "CLIENT_CERTIFICATE_REFUSED"


@dataclass(frozen=True, slots=True)
class Settings:
    """What those who connect call the settings that help them: to use TLS, to trust a CA, to have a
    certificate, to use none."""

    use: str
    ca: str
    cert: str
    off: str


_TEXTS = {
    Trouble.SERVER_SPEAKS_TLS: "the server speaks TLS: use {use}",
    Trouble.SERVER_SPEAKS_PLAINTEXT: "the server does not speak TLS on this port: check the port, or {off}",
    Trouble.UNKNOWN_CA: "the server's certificate is of a CA that is not trusted here: name its CA with {ca}",
    Trouble.EXPIRED: "the server's certificate has expired: its operator must renew it",
    Trouble.NOT_YET_VALID: "the server's certificate is not valid yet: compare the clocks of both machines",
    Trouble.WRONG_NAME: "the server's certificate is for another name: connect by a name that it has, or "
    "have this one added",
    Trouble.NO_CLIENT_CERTIFICATE: "the server asks for a certificate of its clients: give one with {cert}",
    Trouble.CLIENT_CERTIFICATE_REFUSED: "the server refused this side's certificate, which has expired or is "
    "of a CA that the server does not trust: give another with {cert}",
}


def describe(trouble: Trouble, settings: Settings) -> str:
    """What is wrong and what to do."""
    use, ca, cert, off = settings.use, settings.ca, settings.cert, settings.off
    return _TEXTS[trouble].format(use=use, ca=ca, cert=cert, off=off)


def may_be_trouble(message: str) -> bool:
    """Whether a call failed with this message because a server was reached and hung up before any call."""
    return _NOT_CONNECTED in message and any(sign in message for sign in _CONNECTED_AND_LOST)


def find_trouble(message: str, tls: Tls | grpc.ChannelCredentials | None) -> Trouble | None:
    """The trouble of a call that failed with this message. Blocks for some seconds at most, while it connects
    once more to where the failed call did; it does not where gRPC's own account is enough, or no server was
    reached.

    tls: what the failed call had.
    """
    if not may_be_trouble(message):
        return None
    if told := _told(message):
        return told
    address = _ADDRESS.search(message)
    if address is None:
        return None
    host, port = unquote(address[2]).strip("[]"), int(address[3])
    try:
        return _probe(host, port, tls)
    except OSError:
        return None


def _told(message: str) -> Trouble | None:
    """OpenSSL's words, of gRPC or of Python."""
    for words, trouble in _WORDS.items():
        if words in message.lower():
            return trouble
    return None


_WORDS = {
    "wrong_version_number": Trouble.SERVER_SPEAKS_PLAINTEXT,
    "http_request": Trouble.SERVER_SPEAKS_PLAINTEXT,
    "certificate has expired": Trouble.EXPIRED,
    "certificate is not yet valid": Trouble.NOT_YET_VALID,
    "hostname verification check failed": Trouble.WRONG_NAME,
    "unable to get local issuer": Trouble.UNKNOWN_CA,
    "unable to get issuer": Trouble.UNKNOWN_CA,
    "self signed certificate": Trouble.UNKNOWN_CA,
    "self-signed certificate": Trouble.UNKNOWN_CA,
    "certificate signature failure": Trouble.UNKNOWN_CA,
    "_alert_certificate_required": Trouble.NO_CLIENT_CERTIFICATE,
}


def _probe(host: str, port: int, tls: Tls | grpc.ChannelCredentials | None) -> Trouble | None:
    """Raises OSError when nothing can be learned. A name is not compared: gRPC tells of that itself."""
    try:
        context = _context(tls)
        with (
            socket.create_connection((host, port), _PROBE_TIMEOUT_S) as connection,
            context.wrap_socket(connection) as secure,
        ):
            if tls is None:
                return Trouble.SERVER_SPEAKS_TLS
            # A server that misses a certificate hangs up; others greet.
            refused = not secure.recv(1)
    except ssl.SSLError as error:
        reason = f"{error.reason} {getattr(error, 'verify_message', '')}"
        refused = "ALERT" in reason
        if tls is None:
            return Trouble.SERVER_SPEAKS_TLS if refused else None
        if told := _told(reason):
            return told
    if not refused:
        return None
    no_certificate = isinstance(tls, Tls) and tls.cert is None
    return Trouble.NO_CLIENT_CERTIFICATE if no_certificate else Trouble.CLIENT_CERTIFICATE_REFUSED


def _context(tls: Tls | grpc.ChannelCredentials | None) -> ssl.SSLContext:
    """Raises OSError for files that have gone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    if isinstance(tls, Tls) and tls.ca is not None:
        context.load_verify_locations(tls.ca)
    else:
        context.verify_mode = ssl.CERT_NONE
    if isinstance(tls, Tls) and tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key, password="")
    return context
