"""The format of a store, which the store itself states: what another format holds is never guessed at.

Format 1 kept records without seals and no lines for listings; format 2 had both, and sha256 of all data.
Format 3 has BLAKE3 of the data (files/hashing.py), so the same adapter has another digest there. Format 4
keeps the files of each push for itself; before, those of the first push stood for all of the same content.
"""

from adapter_store.errors import NoStore, OtherFormat

FORMAT = 4
MIGRATED = (2, 3)  # what a migration reads (old_stores)


def no_store(where: str) -> NoStore:
    return NoStore(
        f"there is no adapter store in {where}: is it mistyped? A scheduler that is started with it makes one"
    )


def other_format(where: str, found: int) -> OtherFormat:
    if found in MIGRATED:
        todo = "`lorafleet adapters migrate` copies it into a new store"
    elif found < FORMAT:
        todo = "push its adapters into a new store, with the PEFT folders that they were made from"
    else:
        todo = "a newer LoraFleet made it: use that one"
    return OtherFormat(f"the adapter store in {where} has format {found}, not {FORMAT}: {todo}", found)
