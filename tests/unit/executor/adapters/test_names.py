from executor.adapters.names import MAX_NAMES, MAX_VERSIONS, AdapterNames


def test_a_version_has_every_name_that_it_was_asked_for_by() -> None:
    names = AdapterNames()
    for name in ("globex/support", "acme/support", "globex/support"):
        names.told("d1", name)
    assert names.of("d1") == ("acme/support", "globex/support")


def test_what_nobody_named_goes_by_its_digest() -> None:
    names = AdapterNames()
    names.told("d1", "")
    names.told("", "acme/base")
    assert names.of("d1") == ("d1",) and names.of("") == ("",)


def test_the_newest_names_and_the_versions_asked_for_last_are_kept() -> None:
    names = AdapterNames()
    for number in range(MAX_NAMES + 1):
        names.told("shared", f"t{number}/a")
    for number in range(MAX_VERSIONS - 1):
        names.told(f"d{number}", "acme/many")
    assert names.of("shared") == tuple(f"t{number}/a" for number in range(1, MAX_NAMES + 1))
    names.told("d0", "acme/many")
    names.told("new", "acme/new")
    assert names.of("shared") == ("shared",) and names.of("d0") == ("acme/many",)
