"""When certificates end, read from where X.509 has it: the standard library tells that of CAs only."""

import re
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime

_PEM = re.compile(rb"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----(.+?)-----END ", re.DOTALL)
_VERSION = 0xA0  # The one field before the validity that may be missing.
_UTC_TIME, _GENERALIZED_TIME = 0x17, 0x18


def ends(pem: bytes) -> list[float]:
    """Unix seconds, of each certificate in a PEM file that OpenSSL has read. Raises ValueError for none, and
    for bytes that are no certificate."""
    found = [_end(ssl.PEM_cert_to_DER_cert(_wrapped(each))) for each in _PEM.findall(pem)]
    if not found:
        raise ValueError("holds no certificate")
    return found


def _wrapped(body: bytes) -> str:
    return f"{ssl.PEM_HEADER}\n{body.decode('ascii').strip()}\n{ssl.PEM_FOOTER}"


def _end(der: bytes) -> float:
    try:
        _, certificate = next(_values(der))
        _, signed = next(_values(certificate))
        # Serial number, signature's algorithm, issuer, validity, and more.
        fields = [content for tag, content in _values(signed) if tag != _VERSION]
        _, (tag, not_after) = _values(fields[3])
        return _unix_seconds(tag, not_after.decode("ascii"))
    except (IndexError, StopIteration) as error:
        raise ValueError("is no certificate") from error


def _values(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of one value after the other."""
    at = 0
    while at < len(der):
        tag, length, at = der[at], der[at + 1], at + 2
        if length > 0x7F:  # So many bytes of length follow.
            num_bytes = length & 0x7F
            length, at = int.from_bytes(der[at : at + num_bytes]), at + num_bytes
        yield tag, der[at : at + length]
        at += length


def _unix_seconds(tag: int, text: str) -> float:
    """X.509 has two digits of the year until 2049, and four from then on; always in UTC."""
    if tag == _UTC_TIME:
        text = ("20" if text < "50" else "19") + text
    elif tag != _GENERALIZED_TIME:
        raise ValueError("is no certificate: its end is no time")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
