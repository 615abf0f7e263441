"""Any sequence of pushes, moves and deletions: the store agrees with a dictionary."""

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from adapter_store import AdapterNotFound, GenerationMismatch, InUse, ModelSpec, PushOptions, Ref
from tests.support.stores.media import DiskMedium, Medium, RedisMedium, versions_in

TENANTS, NAMES, ALIASES = ("acme", "zoo"), ("x", "x-y"), ("latest", "prod")
Key = tuple[str, str]

where = st.tuples(st.sampled_from(TENANTS), st.sampled_from(NAMES))
which = st.integers(0, 2)
alias_name = st.sampled_from(ALIASES)
expectation = st.one_of(st.none(), st.integers(0, 3))


class StoreMachine(RuleBasedStateMachine):
    adapters: list[Path]
    spec: ModelSpec
    make_medium: Callable[[], Medium]

    def __init__(self) -> None:
        super().__init__()
        self.medium = type(self).make_medium()
        self.store = self.medium.open()
        self.versions: dict[Key, dict[str, bool]] = {}  # digest -> protected
        self.aliases: dict[Key, dict[str, tuple[str, int]]] = {}
        self.spent: dict[Key, dict[str, int]] = {}  # last generation of deleted aliases
        self.digests = [
            self.store.put(folder, "probe", "probe", self.spec, PushOptions(dry_run=True)).digest
            for folder in self.adapters
        ]

    def attempt(self, error: type[Exception] | None, action: Callable[[], object]) -> bool:
        """True when the model says that it succeeds, and it does."""
        if error is None:
            action()
            return True
        with pytest.raises(error):
            action()
        return False

    def moved(self, key: Key, alias: str, digest: str, expected: int | None) -> type[Exception] | None:
        """Moves the alias in the model, or says why it cannot move."""
        current, generation = self.aliases.get(key, {}).get(alias, (None, 0))
        if expected is not None and expected != generation:
            return GenerationMismatch
        if current != digest:
            last = generation or self.spent.get(key, {}).get(alias, 0)
            self.aliases.setdefault(key, {})[alias] = (digest, last + 1)
        return None

    def drop_alias(self, key: Key, alias: str) -> None:
        self.spent.setdefault(key, {})[alias] = self.aliases[key].pop(alias)[1]

    @rule(key=where, index=which, alias=st.one_of(st.none(), alias_name), expected=expectation)
    def put(self, key: Key, index: int, alias: str | None, expected: int | None) -> None:
        digest = self.digests[index]
        error = None if alias is None else self.moved(key, alias, digest, expected)
        if self.attempt(
            error,
            lambda: self.store.put(
                self.adapters[index], *key, self.spec, PushOptions(alias=alias, expected_generation=expected)
            ),
        ):
            self.versions.setdefault(key, {}).setdefault(digest, False)

    @rule(key=where, index=which, alias=alias_name, expected=expectation)
    def set_alias(self, key: Key, index: int, alias: str, expected: int | None) -> None:
        digest = self.digests[index]
        known = digest in self.versions.get(key, {})
        error = self.moved(key, alias, digest, expected) if known else AdapterNotFound
        self.attempt(error, lambda: self.store.set_alias(*key, alias, digest, expected_generation=expected))

    @rule(key=where, alias=alias_name)
    def delete_alias(self, key: Key, alias: str) -> None:
        error = None if alias in self.aliases.get(key, {}) else AdapterNotFound
        if self.attempt(error, lambda: self.store.delete_alias(*key, alias)):
            self.drop_alias(key, alias)

    @rule(key=where, index=which, protected=st.booleans())
    def protect(self, key: Key, index: int, protected: bool) -> None:
        digest = self.digests[index]
        error = None if digest in self.versions.get(key, {}) else AdapterNotFound
        if self.attempt(error, lambda: self.store.set_protected(*key, digest, protected)):
            self.versions[key][digest] = protected

    @rule(key=where, index=which)
    def delete_digest(self, key: Key, index: int) -> None:
        self.delete(key, Ref(*key, digest=self.digests[index]), self.digests[index])

    @rule(key=where, alias=alias_name)
    def delete_behind_alias(self, key: Key, alias: str) -> None:
        self.delete(key, Ref(*key, alias=alias), self.aliases.get(key, {}).get(alias, ("", 0))[0])

    def delete(self, key: Key, ref: Ref, digest: str) -> None:
        versions, aliases = self.versions.get(key, {}), self.aliases.get(key, {})
        error: type[Exception] | None = None
        if digest not in versions:
            error = AdapterNotFound
        elif versions[digest] or any(d == digest and a != ref.alias for a, (d, _) in aliases.items()):
            error = InUse
        if self.attempt(error, lambda: self.store.delete(ref)):
            del versions[digest]
            if ref.alias is not None:
                self.drop_alias(key, ref.alias)
            if not versions:  # the name is gone, with all that was known of it
                self.spent.pop(key, None)

    @rule()
    def reopen(self) -> None:
        self.store = self.medium.open()

    @invariant()
    def agrees(self) -> None:
        for tenant in TENANTS:
            listed = [(v.name, v.digest, v.protected) for v in versions_in(self.store, tenant)]
            expected = [
                (name, digest, protected)
                for (owner, name), versions in self.versions.items()
                for digest, protected in versions.items()
                if owner == tenant
            ]
            assert listed == sorted(expected, key=lambda entry: f"{entry[0]}@{entry[1]}")
            found = [(a.name, a.alias, a.digest, a.generation) for a in self.store.aliases(tenant)]
            assert sorted(found) == sorted(
                (name, alias, *entry)
                for (owner, name), aliases in self.aliases.items()
                for alias, entry in aliases.items()
                if owner == tenant
            )
        for key, aliases in self.aliases.items():
            for alias, (digest, _) in aliases.items():
                assert self.store.resolve(Ref(*key, alias=alias)).digest == digest
        assert self.medium.digests() == {digest for owned in self.versions.values() for digest in owned}


@pytest.mark.parametrize("kind", ["disk", "redis"])
def test_store_agrees_with_a_dictionary(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, adapters: list[Path], spec: ModelSpec
) -> None:
    def make_medium() -> Medium:
        name = uuid.uuid4().hex
        if kind == "disk":
            return DiskMedium(tmp_path / name)
        return RedisMedium(request.getfixturevalue("redis_server"), name)

    fields = {"adapters": adapters, "spec": spec, "make_medium": staticmethod(make_medium)}
    machine = type("Machine", (StoreMachine,), fields)
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=25, stateful_step_count=20, suppress_health_check=list(HealthCheck)),
    )
