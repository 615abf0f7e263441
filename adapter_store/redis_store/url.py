"""A store's url: `redis://[user:password@]host[:port][,...][/db][?option=value&...]`; rediss is TLS.

A password with a character that means something in a url ends up in any part of it, and so does one whose
"@host" was forgotten. So an error names the part that is wrong and never quotes what stands there.
"""

import ipaddress
import re
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path

from adapter_store.errors import InvalidRef

SCHEMES = ("redis", "rediss")
_OPTIONS = frozenset(
    {
        "allow_volatile",
        "namespace",
        "replicas",
        "timeout",
        "password_file",
        "ca_file",
        "cert_file",
        "key_file",
    }
)
_HOST = re.compile(r"(?!-)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*\.?")
_MAX_DIGITS = 9
_HELP = (
    "write the characters :/?#[]@% of a user and a password as %3A %2F %3F %23 %5B %5D %40 %25, "
    "or keep the password in a file and name it with ?password_file="
)
_SWITCH = {"1": True, "true": True, "0": False, "false": False}


@dataclass(frozen=True, slots=True)
class Node:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """Where the server is, who we are, and what may be lost. Its text has no secret."""

    nodes: tuple[Node, ...]  # any of them may be the primary, now or later
    tls: bool = False
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)  # what `password_file` held, if there is one
    db: int = 0
    namespace: str = "lorafleet"  # what all keys begin with
    allow_volatile: bool = False  # take a server without append-only file: a crash may lose what was stored
    replicas: int = 0  # how many must have a change, too, before it counts
    timeout: float = 10.0  # seconds for one exchange
    password_file: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    @classmethod
    def parse(cls, text: str, *, allow_volatile: bool = False) -> "RedisUrl":
        """Raises InvalidRef, naming the part, never with the secret in it."""
        scheme, login, hosts, path, query = _split(text)
        username, password = _login(login)
        options = _options(query)
        file = options.get("password_file")
        if file is not None:
            password = _read_secret(file)
        return cls(
            nodes=tuple(_node(host) for host in hosts.split(",")),
            tls=scheme == "rediss",
            username=username or None,
            password=password or None,
            db=_number(path or "0", "database"),
            namespace=_namespace(options.get("namespace", "lorafleet")),
            allow_volatile=allow_volatile or _switch(options.get("allow_volatile", "0"), "allow_volatile"),
            replicas=_number(options.get("replicas", "0"), "replicas"),
            timeout=_positive(options.get("timeout", "10"), "timeout"),
            password_file=file,
            ca_file=options.get("ca_file"),
            cert_file=options.get("cert_file"),
            key_file=options.get("key_file"),
        )

    def read_password(self) -> str | None:
        """The password as it is now: what `password_file` holds may have changed. Raises InvalidRef."""
        return self.password if self.password_file is None else _read_secret(self.password_file) or None

    def __str__(self) -> str:
        nodes = ",".join(str(node) for node in self.nodes)
        return f"{'rediss' if self.tls else 'redis'}://{nodes}/{self.db}"


def _split(text: str) -> tuple[str, str, str, str, str]:
    """Scheme, login, hosts, path and query. By hand, as `urlsplit` quotes in its errors what it was given."""
    scheme, colon, rest = text.strip().partition("://")
    if not colon or scheme not in SCHEMES:
        raise InvalidRef("store url: the scheme is neither redis:// nor rediss://")
    if "#" in rest:
        raise InvalidRef(f"store url: it has a #, which no part of it may have: {_HELP}")
    address, query_mark, query = rest.partition("?")
    authority, _, path = address.partition("/")
    if "@" in path or "@" in query:
        part = "/" if "/" in address else query_mark
        raise InvalidRef(
            f"store url: the first {part} ends the login and the hosts, and an @ follows: {_HELP}"
        )
    login, _, hosts = authority.rpartition("@")
    return scheme, login, hosts, path, query


def _login(text: str) -> tuple[str, str]:
    """User and password."""
    try:
        username, _, password = (urllib.parse.unquote(part, errors="strict") for part in text.partition(":"))
        (username + password).encode()
    except UnicodeError:  # its text quotes what it could not read
        raise InvalidRef(f"store url: the user or the password is not UTF-8: {_HELP}") from None
    return username, password


def _options(query: str) -> dict[str, str]:
    pairs = urllib.parse.parse_qsl(query, keep_blank_values=True)
    for number, (name, _) in enumerate(pairs, 1):
        if name not in _OPTIONS:
            raise InvalidRef(f"store url: option {number} is none of {', '.join(sorted(_OPTIONS))}")
    return dict(pairs)


def _node(text: str) -> Node:
    if not text:
        raise InvalidRef(f"store url: names no host after the login: {_HELP}")
    host, colon, port = text.lower().rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text.lower(), "6379"
    host, is_bracketed = (host[1:-1], True) if host.startswith("[") and host.endswith("]") else (host, False)
    is_host = _is_ipv6(host) if is_bracketed else len(host) <= 253 and _HOST.fullmatch(host)
    if not is_host or not (port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536):
        raise InvalidRef(f"store url: what follows the login is not host:port: {_HELP}")
    return Node(host, int(port))


def _is_ipv6(text: str) -> bool:
    try:
        return bool(ipaddress.IPv6Address(text))
    except ValueError:
        return False


def _number(text: str, part: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise InvalidRef(f"store url: {part} is not a whole number of at most {_MAX_DIGITS} digits: {_HELP}")
    return int(text)


def _positive(text: str, part: str) -> int:
    if (number := _number(text, part)) == 0:
        raise InvalidRef(f"store url: {part} must be above 0")
    return number


def _switch(text: str, part: str) -> bool:
    if text not in _SWITCH:
        raise InvalidRef(f"store url: {part} is neither 1 nor 0")
    return _SWITCH[text]


def _namespace(text: str) -> str:
    if not text or not set(text) <= set("abcdefghijklmnopqrstuvwxyz0123456789._-"):
        raise InvalidRef("store url: namespace may hold a-z, 0-9, dots, dashes and underscores")
    return text


def _read_secret(path: str) -> str:
    """The path is not quoted either: who takes the option for the password itself writes that there."""
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise InvalidRef(f"store url: the file of password_file cannot be read: {error.strerror}") from None
    except ValueError:
        raise InvalidRef(
            "store url: the file of password_file is not UTF-8 text, or its name is none"
        ) from None
