"""The PEM files of one side of a connection: read, checked, and read again when they change."""

import logging
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from lorafleet.tls.expiry import ends

logger = logging.getLogger(__name__)

File = str | PathLike[str]


class TlsError(Exception):
    """A file cannot be used; the text names it."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM form; a certificate and its key go together.

    ca: who may sign the other side's certificate; without it a client trusts the roots that gRPC brings, and
    a server asks no client for a certificate. cert, key: this side's own certificate, with what is between it
    and its CA after it, and its key, which no password protects.

    Raises ValueError for one of the two without the other.
    """

    ca: File | None = None
    cert: File | None = None
    key: File | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("a certificate and its key go together: give both files, or none")


@dataclass(frozen=True, slots=True)
class Pem:
    """What the files held, checked. None where there is no file.

    cert_end, ca_end: unix seconds; when the first certificate of the own chain ends, and the last of the CAs.
    """

    ca: bytes | None
    cert: bytes | None
    key: bytes | None
    cert_end: float | None = None
    ca_end: float | None = None


def read(tls: Tls) -> Pem:
    """Raises TlsError for files that cannot be read, are no PEM, or do not belong together."""
    ca, cert, key = (_bytes(file) for file in (tls.ca, tls.cert, tls.key))
    checking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca is not None:
        _check_ca(checking, ca, tls.ca)
    if tls.cert is not None:
        _check_pair(checking, tls.cert, tls.key)
        # The check has read them by itself.
        if (cert, key) != (_bytes(tls.cert), _bytes(tls.key)):
            raise TlsError(f"{tls.cert} or its key has changed while it was read")
    # Of a chain all are needed. Of CAs the last one is: a new one stands beside the old one for a while.
    return Pem(ca, cert, key, _end(min, cert, tls.cert), _end(max, ca, tls.ca))


class WatchedFiles:
    """The newest files that could be used. May be asked from any thread."""

    def __init__(self, tls: Tls) -> None:
        """Raises TlsError: there is nothing yet that could be kept."""
        self.tls = tls
        self._stamps = _stamps(tls)
        self._pem = read(tls)
        self._lock = threading.Lock()

    @property
    def pem(self) -> Pem:
        """Files that became unusable, as half written ones are, change nothing; the log says so once."""
        with self._lock:
            stamps = _stamps(self.tls)
            if stamps == self._stamps:
                return self._pem
            self._stamps = stamps
            try:
                self._pem = read(self.tls)
                logger.info("read new TLS files: %s", _names(self.tls))
            except TlsError as error:
                logger.error("keeping the TLS files read before: %s", error)
            return self._pem

    def expiries(self, cert: str, ca: str) -> Iterator[tuple[str, Callable[[], float]]]:
        """Ends for metrics: the flags that name the files there are, each with what tells when that ends."""
        if self.tls.cert is not None:
            yield cert, lambda: self.pem.cert_end or 0.0
        if self.tls.ca is not None:
            yield ca, lambda: self.pem.ca_end or 0.0


def _bytes(file: File | None) -> bytes | None:
    if file is None:
        return None
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise TlsError(f"{file}: {error.strerror or error}") from error


def _check_ca(checking: ssl.SSLContext, content: bytes, file: File | None) -> None:
    try:
        checking.load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise TlsError(f"{file}: holds no certificates in PEM form") from error
    if not checking.cert_store_stats()["x509"]:
        raise TlsError(f"{file}: holds no certificates in PEM form")


def _check_pair(checking: ssl.SSLContext, cert: File, key: File | None) -> None:
    try:
        checking.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        if "MISMATCH" in (error.reason or ""):
            raise TlsError(f"{key}: is not the key of {cert}") from error
        raise TlsError(f"{cert}, {key}: no certificate in PEM form with its key") from error
    except (OSError, ValueError) as error:
        raise TlsError(f"{cert}, {key}: {error}") from error


def _end(which: Callable[[list[float]], float], content: bytes | None, file: File | None) -> float | None:
    try:
        return None if content is None else which(ends(content))
    except ValueError as error:
        raise TlsError(f"{file}: {error}") from error


def _no_password() -> str:
    raise ValueError("the key is protected by a password, for which nobody can be asked here")


def _stamps(tls: Tls) -> tuple[tuple[int, int, int] | None, ...]:
    return tuple(stamp(file) for file in (tls.ca, tls.cert, tls.key))


def stamp(file: File | None) -> tuple[int, int, int] | None:
    """Changes when the file does, also when another one is renamed over it or over what it links to."""
    if file is None:
        return None
    try:
        status = Path(file).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _names(tls: Tls) -> str:
    return ", ".join(str(file) for file in (tls.ca, tls.cert, tls.key) if file is not None)
