"""Seals: a value is refused unless it is, byte for byte, the one that was written under its key."""

import hashlib

from adapter_store.errors import DataLoss


def seal(key: str, body: str) -> bytes:
    """`body` behind a hash of itself and its key."""
    data = body.encode()
    return _hash(key, data) + b"\n" + data


def unseal(key: str, value: bytes) -> str:
    """Raises DataLoss when `value` is damaged, or was written under another key."""
    found, _, data = value.partition(b"\n")
    if found != _hash(key, data):
        raise DataLoss(f"what the store holds as {key} is not what was written there")
    return data.decode()


def _hash(key: str, data: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\n" + data).hexdigest().encode()
