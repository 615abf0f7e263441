"""Bearer tokens to identities."""

import hashlib
import logging
import os
from pathlib import Path

import pytest

from scheduler.admission.auth import ADMIN, INFER, Authenticator, Identity, InvalidTokenFile
from scheduler.errors import Unauthenticated


def entry(token: str, tenant: str, rights: str = '["infer"]', more: str = "") -> str:
    hashed = hashlib.sha256(token.encode()).hexdigest()
    return f'[[tokens]]\nsha256 = "{hashed}"\ntenant = "{tenant}"\nrights = {rights}\n{more}\n'


def bearer(token: str) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "test"), ("authorization", f"Bearer {token}")]


def test_without_a_file_everybody_is_the_default_tenant_with_all_rights() -> None:
    identity = Authenticator().identify(())
    assert (identity.tenant, identity.rights) == ("default", {INFER, ADMIN})
    assert identity.sees("any", "thing")


def test_a_token_gives_its_tenant_rights_and_patterns(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(entry("one", "acme") + entry("two", "ops", '["admin"]', 'adapters = ["*/x-*"]'))
    authenticator = Authenticator(file)
    assert authenticator.identify(bearer("one")) == Identity("acme", frozenset({INFER}), ("acme/*",))
    assert authenticator.identify(bearer("two")) == Identity("ops", frozenset({ADMIN}), ("*/x-*",))


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        [],
        [("authorization", "Bearer wrong")],
        [("authorization", "Bearer ")],
        [("authorization", "Basic one")],
        [("authorization", "one")],
        [("authorization", b"Bearer one")],
        [("authorization", "Bearer one"), ("authorization", "Bearer one")],
    ],
)
def test_everything_else_is_nobody(tmp_path: Path, metadata: list[tuple[str, str | bytes]] | None) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(entry("one", "acme"))
    with pytest.raises(Unauthenticated):
        Authenticator(file).identify(metadata)


def test_patterns_do_not_cross_the_slash() -> None:
    identity = Identity("acme", frozenset(), ("acme/*", "shared/legal-?"))
    assert identity.sees("acme", "x")
    assert identity.sees("shared", "legal-1")
    assert not identity.sees("shared", "legal-12")
    assert not identity.sees("acme2", "x")
    assert not Identity("a", frozenset(), ("a*/y",)).sees("acme", "x")


def test_what_visible_names_begin_with() -> None:
    adapters = ("acme/chat-*", "acme/chat-en", "acme/v[12]", "acm?/support", "zoo/*", "*/x?")
    identity = Identity("acme", frozenset(), adapters)
    assert identity.name_prefixes("acme") == ("chat-", "support", "v", "x")
    assert identity.name_prefixes("zoo") == ("",)
    assert identity.name_prefixes("other") == ("x",)
    assert Identity("acme", frozenset(), ("acme/*",)).name_prefixes("zoo") == ()


def test_a_changed_file_counts_at_once(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(entry("one", "acme"))
    authenticator = Authenticator(file)
    replacement = tmp_path / "new.toml"
    replacement.write_text(entry("two", "acme"))
    os.replace(replacement, file)
    assert authenticator.identify(bearer("two")).tenant == "acme"
    with pytest.raises(Unauthenticated):
        authenticator.identify(bearer("one"))


def test_a_broken_change_keeps_the_tokens_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(entry("one", "acme"))
    authenticator = Authenticator(file)
    file.write_text("[[tokens]\n")
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert authenticator.identify(bearer("one")).tenant == "acme"
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("x = 1", "tokens"),
        ("[[tokens]]\ntenant = 'a'\nrights = []", r"tokens\[0\]"),
        (entry("one", "Acme"), "tenant"),
        (entry("one", "acme", '["root"]'), "rights"),
        (entry("one", "acme", '"infer"'), "rights"),
        (entry("one", "acme", more='adapters = ["acme"]'), "adapters"),
        (entry("one", "acme", more='token = "one"'), r"tokens\[0\]"),
        (entry("one", "acme").replace('sha256 = "', 'sha256 = "X'), "sha256"),
    ],
)
def test_a_wrong_file_is_refused_at_the_start(tmp_path: Path, content: str, named: str) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(content)
    with pytest.raises(InvalidTokenFile, match=named):
        Authenticator(file)
