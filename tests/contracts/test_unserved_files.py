"""Clients refuse what a store would refuse, before they send it: neither can import the other's list."""

from adapter_store.peft.source import UNSERVED_FILES
from lorafleet import transfer


def test_clients_and_stores_refuse_the_same_files() -> None:
    assert set(transfer.UNSERVED_FILES) == set(UNSERVED_FILES)
