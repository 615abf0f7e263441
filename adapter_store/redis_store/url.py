"""A store's url: `redis://[user:password@]host[:port][,...][/db][?option=value&...]`; rediss is TLS."""

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
    username: str | None = None
    password: str | None = field(default=None, repr=False)  # what `password_file` held, if there is one
    db: int = 0
    namespace: str = "lorafleet"  # what all keys begin with
    allow_volatile: bool = False  # take a server without append-only file: a crash may lose what was stored
    replicas: int = 0  # how many must have a change, too, before it counts
    timeout: float = 10.0  # seconds for one exchange
    password_file: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    @classmethod
    def parse(cls, text: str, *, allow_volatile: bool = False) -> "RedisUrl":
        """Raises InvalidRef, naming the part, never with the secret in it."""
        parts = urllib.parse.urlsplit(text)
        if parts.scheme not in SCHEMES:
            raise InvalidRef("store url: the scheme is neither redis nor rediss")
        login, _, hosts = parts.netloc.rpartition("@")
        username, _, password = (urllib.parse.unquote(part) for part in login.partition(":"))
        options = _options(parts.query)
        file = options.get("password_file")
        if file is not None:
            password = _read_secret(file)
        return cls(
            nodes=tuple(_node(host) for host in hosts.split(",")),
            tls=parts.scheme == "rediss",
            username=username or None,
            password=password or None,
            db=_number(parts.path.removeprefix("/") or "0", "database"),
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
        """As it is now: what `password_file` holds may have changed. Raises InvalidRef."""
        return self.password if self.password_file is None else _read_secret(self.password_file) or None

    def __str__(self) -> str:
        nodes = ",".join(str(node) for node in self.nodes)
        return f"{'rediss' if self.tls else 'redis'}://{nodes}/{self.db}"


def _options(query: str) -> dict[str, str]:
    options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    for name in options.keys() - _OPTIONS:
        raise InvalidRef(f"store url: there is no option {name!r}, only {', '.join(sorted(_OPTIONS))}")
    return options


def _node(text: str) -> Node:
    try:
        parts = urllib.parse.urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidRef(f"store url: {text!r} is not host:port") from error
    if not host:
        raise InvalidRef("store url: names no host")
    return Node(host, 6379 if port is None else port)


def _number(text: str, part: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise InvalidRef(f"store url: {part} is not a whole number")
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
    try:
        return Path(path).read_text().strip()
    except (OSError, ValueError) as error:
        raise InvalidRef(f"store url: password_file {path} cannot be read") from error
