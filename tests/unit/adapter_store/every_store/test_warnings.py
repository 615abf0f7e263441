"""Warnings of a push: kept with their reasons, and refusals of a strict one."""

import pickle
from pathlib import Path

import pytest

from adapter_store import (
    AdapterStore,
    IncompatibleAdapter,
    InvalidAdapter,
    ModelSpec,
    PushOptions,
    PushWarning,
    WarningsRefused,
)
from tests.support.adapters.peft import edit_config
from tests.support.stores.media import Medium, at, versions_in

CALLERS = PushWarning("TEMPLATE_FAILS", "chat_template.jinja: fails for a second message")


def reasons(warnings: tuple[PushWarning, ...]) -> list[str]:
    return [warning.reason for warning in warnings]


def test_what_the_caller_found_is_kept_behind_the_store_s_own(
    store: AdapterStore, adapter: Path, spec: ModelSpec, medium: Medium
) -> None:
    edit_config(adapter, base_model_name_or_path="acme/other")
    pushed = store.put(adapter, "acme", "x", spec, PushOptions(warnings=(CALLERS,)))
    assert reasons(pushed.push.warnings) == ["OTHER_BASE_MODEL", "TEMPLATE_FAILS"]
    assert pushed.push.warnings[-1] == CALLERS
    again = medium.open()
    assert again.find(at(pushed)) == pushed and versions_in(again, "acme") == [pushed]
    assert reasons(store.put(adapter, "acme", "x", spec).push.warnings) == ["OTHER_BASE_MODEL"]


def test_what_they_quote_is_short_and_printable(store: AdapterStore, adapter: Path, spec: ModelSpec) -> None:
    odd = PushWarning("ODD", "\x1b[31m" + "x" * 5000)
    [warning] = store.put(adapter, "acme", "x", spec, PushOptions(warnings=(odd, odd))).push.warnings
    assert warning.message.startswith("\\x1b[31mxx") and len(warning.message) < 1100


@pytest.mark.parametrize("dry_run", [False, True], ids=["push", "dry run"])
def test_a_strict_push_with_warnings_names_each_and_stores_nothing(
    store: AdapterStore, adapter: Path, spec: ModelSpec, medium: Medium, dry_run: bool
) -> None:
    edit_config(adapter, base_model_name_or_path="acme/other")
    with pytest.raises(
        WarningsRefused, match=r"there are 2: OTHER_BASE_MODEL: .*acme/other.*; TEMPLATE_FAILS: c"
    ):
        store.put(adapter, "acme", "x", spec, PushOptions(strict=True, warnings=(CALLERS,), dry_run=dry_run))
    assert versions_in(store, "acme") == [] and medium.leftovers() == []
    with pytest.raises(IncompatibleAdapter, match="acme/other"):
        store.put(adapter, "acme", "x", spec, PushOptions(strict=True, strict_base=True, dry_run=dry_run))


def test_a_strict_push_without_warnings_is_a_push(
    store: AdapterStore, adapter: Path, spec: ModelSpec
) -> None:
    edit_config(adapter, base_model_name_or_path=None)
    assert store.put(adapter, "acme", "x", spec, PushOptions(strict=True)).push.warnings == ()
    assert len(versions_in(store, "acme")) == 1


def test_a_refusal_crosses_processes() -> None:
    error = pickle.loads(pickle.dumps(WarningsRefused((("A", "one"), ("B", "two")))))
    assert isinstance(error, InvalidAdapter) and error.warnings == (("A", "one"), ("B", "two"))
