"""Clients tell what a store would tell, before they send it: neither can import the other's list."""

from adapter_store.convert.folder import FORMS
from adapter_store.peft import foreign as of_stores
from adapter_store.peft.source import UNSERVED_FILES
from lorafleet import foreign, transfer


def test_clients_and_stores_refuse_the_same_files() -> None:
    assert set(transfer.UNSERVED_FILES) == set(UNSERVED_FILES)


def test_clients_and_stores_say_the_same_of_foreign_files() -> None:
    assert list(foreign.FOREIGN_FILES.items()) == list(of_stores.FOREIGN_FILES.items())
    assert set(foreign.CONVERTIBLE_FILES) == set(FORMS)
