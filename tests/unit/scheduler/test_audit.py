"""The audit log: what a line has, that a flood does not fill it, and that all is counted."""

import asyncio
import hashlib
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from scheduler import audit
from scheduler.admission.auth import Authenticator
from scheduler.audit import MAX_LINES, Audit, Call
from scheduler.errors import AdapterNotFound, InvalidRequest, PermissionDenied, Unauthenticated

DELETE, GET = "/lorafleet.v1.Adapters/Delete", "/lorafleet.v1.Adapters/Get"
TOKEN = "very-secret"


class Context:
    """What the audit asks of a call's context."""

    def peer(self) -> str:
        return "ipv4:10.0.0.7:1234"


CONTEXT: Any = Context()


class House:
    def __init__(self, folder: Path) -> None:
        file = folder / "tokens.toml"
        self.hashed = hashlib.sha256(TOKEN.encode()).hexdigest()
        file.write_text(f'[[tokens]]\nsha256 = "{self.hashed}"\ntenant = "acme"\nrights = []\n')
        self.now = 0.0
        self.counted: Counter[tuple[str, str, str]] = Counter()
        self.authenticator = Authenticator(file)
        self.audit = Audit([DELETE, GET], self._count, lambda: self.now)

    def _count(self, *labels: str) -> None:
        self.counted[labels] += 1  # type: ignore[index]

    def ends(self, method: str, error: Any, token: str = "", adapter: str = "") -> None:
        self.audit.ended(self._call(method, token, adapter), CONTEXT, error)

    def changes(self, method: str, what: str, about: dict[str, str]) -> None:
        self.audit.changed(self._call(method, TOKEN), CONTEXT, what, about)

    def _call(self, method: str, token: str, adapter: str = "") -> Call:
        bearer = [("authorization", f"Bearer {token}")]
        caller = self.authenticator.identify(bearer) if token else None
        return Call(self.audit, method, adapter, caller)


@pytest.fixture
def house(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> House:
    caplog.set_level(logging.INFO, "lorafleet.audit")
    return House(tmp_path)


async def test_who_was_not_asked_at_a_door_is_nobody(house: House) -> None:
    with pytest.raises(LookupError):
        audit.caller()

    async def begin(_: object) -> None:
        """The call is known, and not who makes it."""
        with pytest.raises(LookupError):
            audit.caller()

    class Details:
        method = DELETE

    await audit.AuditInterceptor(house.audit).intercept_service(begin, Details())


async def test_a_line_says_who_from_where_what_and_how_it_ended(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    denied = PermissionDenied("x", metadata={"right": "manage"})
    house.ends(DELETE, denied, TOKEN, "acme/a")
    house.ends(DELETE, AdapterNotFound("acme/a"), TOKEN, "acme/a")
    house.ends(GET, AdapterNotFound("acme/a"), TOKEN)  # changes nothing
    house.ends("/a.b/" + "x" * 9999, Unauthenticated("x", cause="no_token"), adapter="y" * 9999)
    house.changes(DELETE, "deleted", {"adapter": "acme/a", "digest": "sha256:1"})
    who = ("acme", "token", house.hashed[:12], "ipv4:10.0.0.7:1234", DELETE)
    names = ("caller", "identity", "subject", "peer", "method")
    told = [
        (record.getMessage(), *(getattr(record, name) for name in (*names, "code")))
        for record in caplog.records
    ]
    assert told[0] == ("refused", *who, "PERMISSION_DENIED")
    assert told[1] == ("failed", *who, "NOT_FOUND")
    assert told[2][:4] == ("refused", "", "", "") and told[2][-1] == "UNAUTHENTICATED"
    assert told[3] == ("deleted", *who, "OK")
    assert [getattr(record, "reason", None) for record in caplog.records] == [
        "manage",
        "ADAPTER_NOT_FOUND",
        "no_token",
        None,
    ]
    everything = "".join(str(vars(record)) for record in caplog.records)
    assert TOKEN not in everything and len(everything) < 12_000
    assert house.counted == {
        ("PERMISSION_DENIED", "manage", DELETE): 1,
        ("UNAUTHENTICATED", "no_token", "other"): 1,
    }


async def test_a_flood_is_counted_and_does_not_fill_the_log(
    house: House, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    later: list[tuple[Any, ...]] = []
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_later", lambda delay, *call: later.append(call))
    for _ in range(5000):
        house.ends(GET, Unauthenticated("x", cause="unknown_token"))
    house.ends(DELETE, InvalidRequest("x", "y"), TOKEN)
    house.ends(DELETE, PermissionDenied("x", metadata={"right": "manage"}), TOKEN)
    assert len(caplog.records) == MAX_LINES + 2  # Nobody else's line is left out.
    assert house.counted["UNAUTHENTICATED", "unknown_token", GET] == 5000
    [(close, *arguments)] = later
    close(*arguments)
    close(*arguments)
    assert [getattr(record, "left_out", 0) for record in caplog.records[MAX_LINES:]] == [0, 0, 4980]
    house.now = 1.0
    house.ends(GET, Unauthenticated("x", cause="unknown_token"))
    assert caplog.records[-1].getMessage() == "refused"
