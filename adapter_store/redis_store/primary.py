"""Exchanges with the primary, whichever server that is now.

A connection is used by one exchange at a time and goes back to the pool only when every reply was read; after
anything else it is closed. So no reply can ever reach the next user, whoever interrupts whom.
"""

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import redis
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from adapter_store.errors import StoreUnavailable
from adapter_store.redis_store.login import Login
from adapter_store.redis_store.server import ServerState, read_state
from adapter_store.redis_store.url import Node, RedisUrl

Command = Sequence[str | bytes | int]

ATTEMPTS = 5
_FIRST_PAUSE = 0.05  # seconds; each pause is up to twice as long as the last: 0.75 s in all
LOOK_SECONDS = 1.0  # what the server's settings are is known for so long, while anybody asks for anything
_MAX_CONNECTIONS = 64
_READ_BYTES = 1 << 20
# Replies of a server that is about to be, or is no longer, the primary that we look for.
_PASSING = (ReadOnlyError, ClusterDownError, TryAgainError)
_PASSING_CODES = ("NOREPLICAS", "BUSY", "UNBLOCKED")
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class NotNow(Exception):
    """This attempt failed in a way that another one, perhaps at another server, may not."""


@dataclass(eq=False)
class _Server:
    pool: redis.ConnectionPool
    state: ServerState
    looked_at: float


@dataclass(frozen=True, slots=True)
class Provided:
    """Commands, and a check of their replies that raises when others must not follow on this connection."""

    commands: Sequence[Command]
    check: Callable[[Sequence[Any]], None]


class Primary:
    """Thread-safe. Made: a primary was found and is fit to keep adapters."""

    def __init__(self, url: RedisUrl) -> None:
        """Raises StoreUnavailable; UnsafeStore when the server may lose what it acknowledged."""
        self._url, self._login = url, Login(url)
        self._server: _Server | None = None
        self._lock = threading.Lock()
        self.run(durable=True, changed=lambda replies: False)

    @property
    def problem(self) -> str:
        """Problem of the server that was last talked to: why it may lose what it acknowledges; else ""."""
        server = self._server
        return server.state.problem if server is not None else ""

    def run(
        self,
        *commands: Command,
        durable: bool = False,
        changed: Callable[[Sequence[Any]], bool] = lambda replies: True,
        provided: Provided | None = None,
    ) -> list[Any]:
        """The replies to `commands`, made in order on one connection; tried again as a whole when need be.

        So they must be such that doing them twice does no harm. `durable`: they are on disk, and at as many
        replicas as the url asks for, when this returns; none is made where the server may lose it (raises
        UnsafeStore), though what is there is read on. `changed` tells from the replies whether there is a
        change to wait for: after a fail-over nothing may ever confirm that there was none.
        `provided` comes first, on the same connection.
        Raises StoreUnavailable, and what the check in `provided` raises.
        """
        return self._retried(
            lambda server: self._attempt(server, commands, changed if durable else None, provided)
        )

    def use(self, transfer: Callable[[redis.ConnectionPool], _T]) -> _T:
        """`transfer` with connections to the primary, again when it fails in passing, as commands are.

        Raises StoreUnavailable, and what else `transfer` raises.
        """

        def attempt(server: _Server) -> _T:
            try:
                return transfer(server.pool)
            except ResponseError as error:
                _raise_error(("a transfer",), error)
                raise

        return self._retried(attempt)

    def _retried(self, attempt: Callable[[_Server], _T]) -> _T:
        give_up = time.monotonic() + self._url.timeout
        for number in range(ATTEMPTS):
            server = None
            try:
                server = self._find()
                return attempt(server)
            except (NotNow, RedisError, OSError) as error:
                if isinstance(error, AuthenticationError) and not self._login.refused(error):
                    raise StoreUnavailable("the store's Redis refused the login") from None
                # The first says why; the others, of every call while a server is away, would fill the log.
                level = logging.DEBUG if number else logging.WARNING
                _log.log(level, "%s, attempt %d of %d: %s", self._url, number + 1, ATTEMPTS, error)
                self._forget(server)
            if number + 1 == ATTEMPTS or time.monotonic() > give_up:
                break
            time.sleep(_FIRST_PAUSE * 2**number * random.uniform(0.5, 1))
        raise StoreUnavailable("the store's Redis cannot be reached now")

    # ---- one attempt

    def _attempt(
        self,
        server: _Server,
        commands: Sequence[Command],
        changed: Callable[[Sequence[Any]], bool] | None,
        provided: Provided | None,
    ) -> list[Any]:
        with _connected(server.pool) as connection:
            state = self._look(server, connection, is_change=changed is not None)
            if provided is not None:
                before = _talk(connection, provided.commands)
                for command, reply in zip(provided.commands, before, strict=True):
                    _raise_error(command, reply)
                provided.check(before)
            role, *replies = _talk(connection, [("ROLE",), *commands])
            for command, reply in zip((("ROLE",), *commands), (role, *replies), strict=True):
                _raise_error(command, reply)
            _check_primary(server, role)
            # Asked for by itself, once the writes have left the server's buffer: what waits from before that
            # is looked at again when the server's clock ticks, which takes up to a tenth of a second.
            if changed and changed(replies) and (settling := self._settling(state)):
                [settled] = _talk(connection, [settling])
                self._check_settled(settled)
        return replies

    def _look(self, server: _Server, connection: Any, *, is_change: bool) -> ServerState:
        """At the server's settings, which may change while it runs: before every change, now and then before
        all else. Raises UnsafeStore where a change might be lost."""
        before = server.state
        if not is_change and time.monotonic() - server.looked_at < LOOK_SECONDS:
            return before
        server.looked_at = time.monotonic()
        commands = (("ROLE",), ("INFO",))
        role, info = _talk(connection, commands)
        for command, reply in zip(commands, (role, info), strict=True):
            _raise_error(command, reply)
        _check_primary(server, role)
        state = server.state = read_state(before.node, info, self._url)
        state.tell(before)
        if is_change:
            state.check()
        return state

    def _settling(self, state: ServerState) -> Command | None:
        """Waits, on the connection of the writes, until they are safe."""
        wait = int(self._url.timeout * 800)  # milliseconds, less than until the socket's own timeout
        if state.has_append_only_file:
            return ("WAITAOF", 1, self._url.replicas, wait)
        return ("WAIT", self._url.replicas, wait) if self._url.replicas else None

    def _check_settled(self, reply: Any) -> None:
        if isinstance(reply, ResponseError):  # the append-only file was turned off, or this is a replica now
            raise NotNow(str(reply))
        local, replicas = reply if isinstance(reply, list) else (1, reply)
        if local < 1 or replicas < self._url.replicas:
            raise StoreUnavailable(
                "the store's Redis did not confirm in time that the change is safe; it may have been made"
            )

    # ---- which server

    def _find(self) -> _Server:
        with self._lock:
            if self._server is None:
                self._server = self._discover()
            return self._server

    def _forget(self, server: _Server | None) -> None:
        """Unless somebody has found another one meanwhile. Exchanges under way end or fail by themselves."""
        with self._lock:
            if server is not None and self._server is server:
                self._server = None
                server.pool.disconnect(inuse_connections=False)

    def _discover(self) -> _Server:
        """Asks the url's nodes; a replica tells whom it follows."""
        nodes, asked, failures = list(self._url.nodes), set[Node](), list[str]()
        while nodes:
            node = nodes.pop(0)
            if node in asked:
                continue
            asked.add(node)
            pool = _connection_pool(node, self._url, self._login)
            try:
                [role] = exchange(pool, [("ROLE",)])
                _raise_error(("ROLE",), role)
                if role[0] == b"master":
                    [info] = exchange(pool, [("INFO",)])
                    _raise_error(("INFO",), info)
                    state = read_state(node, info, self._url)
                    state.tell()
                    return _Server(pool, state, time.monotonic())
                failures.append(f"{node} is no primary")
                if role[0] == b"slave":
                    nodes.append(Node(role[1].decode(), int(role[2])))
            except AuthenticationError:
                raise
            except (NotNow, RedisError, OSError) as error:
                failures.append(f"{node}: {error}")
        raise NotNow("; ".join(failures))


def _check_primary(server: _Server, role: Any) -> None:
    if role[0] != b"master":
        raise NotNow(f"{server.state.node} is no longer the primary")


def exchange(pool: redis.ConnectionPool, commands: Sequence[Command]) -> list[Any]:
    """One reply for each command, errors that the server answered among them. Raises RedisError, OSError."""
    with _connected(pool) as connection:
        return _talk(connection, commands)


@contextlib.contextmanager
def _connected(pool: redis.ConnectionPool) -> Iterator[Any]:
    connection: Any = pool.get_connection()
    try:
        yield connection
    except BaseException:  # whatever it is, unread replies may be under way
        connection.disconnect()
        raise
    finally:
        pool.release(connection)


def _talk(connection: Any, commands: Sequence[Command]) -> list[Any]:
    connection.send_packed_command(connection.pack_commands(commands))
    return [_read(connection) for _ in commands]


def _read(connection: Any) -> Any:
    try:
        # Not to be closed by redis-py for a reply that merely says no: the next replies are still to be read.
        return connection.read_response(disconnect_on_error=False)
    except ResponseError as error:
        return error


def _raise_error(command: Command, reply: Any) -> None:
    if not isinstance(reply, ResponseError):
        return
    text = str(reply)
    if isinstance(reply, _PASSING) or text.startswith(_PASSING_CODES):
        raise NotNow(text)
    _log.error("Redis refused %s: %s", command[0], text)
    if isinstance(reply, OutOfMemoryError):
        raise StoreUnavailable("the store's Redis is full: delete adapters, or raise its maxmemory")
    if isinstance(reply, AskError):
        raise StoreUnavailable("the store's Redis is a part of a cluster, and the key is in another part")
    raise StoreUnavailable(f"the store's Redis refused {command[0]!r}: {text}")


def _connection_pool(node: Node, url: RedisUrl, login: Login) -> redis.ConnectionPool:
    """Each new connection logs in with what the password's file holds by then, and reads the certificates'
    files."""
    options: dict[str, Any] = {
        "host": node.host,
        "port": node.port,
        "db": url.db,
        "credential_provider": login,
        "socket_timeout": url.timeout,
        "socket_connect_timeout": min(url.timeout, 3.0),
        "socket_read_size": _READ_BYTES,
        "protocol": 2,
        "decode_responses": False,
    }
    if url.tls:
        options |= {"connection_class": redis.SSLConnection, "ssl_ca_certs": url.ca_file}
        options |= {"ssl_certfile": url.cert_file, "ssl_keyfile": url.key_file}
    return redis.ConnectionPool(max_connections=_MAX_CONNECTIONS, **options)
