import pytest

from adapter_store import InvalidRef, Ref

HEX = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sql", Ref("me", "sql", alias="latest")),
        ("sql@prod", Ref("me", "sql", alias="prod")),
        ("acme/sql@prod", Ref("acme", "sql", alias="prod")),
        (f"acme/sql@sha256:{HEX}", Ref("acme", "sql", digest=f"sha256:{HEX}")),
        ("a.b-c_9", Ref("me", "a.b-c_9", alias="latest")),
        ("a" * 63, Ref("me", "a" * 63, alias="latest")),
    ],
)
def test_parse(text: str, expected: Ref) -> None:
    assert Ref.parse(text, "me") == expected
    assert Ref.parse(str(expected), "someone-else") == expected


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("../other", "tenant"),
        ("/abs/elsewhere", "tenant"),
        ("a/../../b", "tenant"),
        ("a\\..\\b", "name"),
        ("a%2fb", "name"),
        ("a\0b", "name"),
        ("", "name"),
        (".", "name"),
        ("..", "name"),
        ("a" * 64, "name"),
        ("a" * 300, "name"),
        ("a ", "name"),
        (" a", "name"),
        ("a\n", "name"),
        ("SQL", "name"),
        ("sql@", "alias"),
        ("sql@Prod", "alias"),
        ("sql@a@b", "alias"),
        ("sql@sha256:abc", "digest"),
        (f"sql@sha256:{HEX.upper()}", "digest"),
        (f"sql@sha256:{HEX}\n", "digest"),
        ("acme/", "name"),
        ("é", "name"),
    ],
)
def test_parse_names_the_bad_part(text: str, part: str) -> None:
    """No part of a name is a path, or looks like another name."""
    with pytest.raises(InvalidRef, match=part):
        Ref.parse(text, "me")


def test_a_ref_needs_exactly_one_of_alias_and_digest() -> None:
    with pytest.raises(InvalidRef, match="alias or a digest"):
        Ref("me", "sql")
    with pytest.raises(InvalidRef, match="alias or a digest"):
        Ref("me", "sql", alias="prod", digest=f"sha256:{HEX}")
