"""What a connection logs in with: a password that may change while services run."""

import contextlib
import logging
import threading
import time

import redis
from redis.exceptions import AuthenticationError

from adapter_store.errors import InvalidRef
from adapter_store.redis_store.url import RedisUrl

PAUSE_SECONDS = 2.0  # until a refused password is tried again: servers count and log refused logins
_log = logging.getLogger(__name__)


class NotAgainYet(AuthenticationError):
    """The same login was refused a moment ago, so the server was not asked."""


class Login(redis.CredentialProvider):
    """Thread-safe. The password's file is read for every new connection; while it cannot be, what it held
    last counts."""

    def __init__(self, url: RedisUrl) -> None:
        self._url, self._held = url, url.password
        self._refused: tuple[str | None, float] | None = None  # which, and until when it is not tried again
        self._tried = threading.local()  # a connection logs in on the thread that gets the refusal

    def get_credentials(self) -> tuple[str, ...]:  # type: ignore[override]  # none: no login is made
        """The credentials of the connection that this thread makes. Raises NotAgainYet."""
        self._tried.password = password = self._password()
        refused = self._refused
        if refused is not None and refused[0] == password and time.monotonic() < refused[1]:
            raise NotAgainYet("the login was refused a moment ago")
        if self._url.username:
            return self._url.username, password or ""
        return (password,) if password else ()

    def refused(self, error: AuthenticationError) -> bool:
        """After a connection of this thread was refused: whether there is another password by now."""
        tried: str | None = getattr(self._tried, "password", None)
        if not isinstance(error, NotAgainYet):
            _log.error("%s refused the login: %s", self._url, error)
            self._refused = tried, time.monotonic() + PAUSE_SECONDS
        return self._password() != tried

    def _password(self) -> str | None:
        with contextlib.suppress(InvalidRef):  # a file on its way to its new content, or gone since the start
            self._held = self._url.read_password()
        return self._held
