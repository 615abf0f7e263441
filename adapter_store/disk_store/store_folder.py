"""Whether a folder is a store, and of which format: an empty file says so by its name, `format-3`.

Its secret is a file that nobody reads but its owner.
"""

import itertools
import os
import secrets
from pathlib import Path

from adapter_store.files.durable import replace_file, sync_folder
from adapter_store.formats import FORMAT, no_store, other_format
from adapter_store.lease import SECRET_BYTES

_PREFIX = "format-"
_HASH_CHARS = 64  # what a sealed file begins with
_LOOKED_AT = 16  # one damaged record does not make another format


def claim_folder(root: Path, *, create: bool) -> None:
    """Makes a store of the folder if need be. Raises NoStore unless it may, OtherFormat, OSError."""
    found = _stated(root) or _guessed(root)
    if found is None and not create:
        raise no_store(str(root))
    if found is not None and found != FORMAT:
        raise other_format(str(root), found)
    root.mkdir(parents=True, exist_ok=True)
    marker = root / f"{_PREFIX}{FORMAT}"
    if not marker.exists():
        marker.touch()
        sync_folder(root)


def secret_of(root: Path, aside: Path) -> bytes:
    """The secret, as AdapterStore.secret. Under the store's lock, and `aside` is as for replace_file. Raises
    OSError."""
    path = root / "secret"
    if not path.exists() or path.stat().st_size != SECRET_BYTES:  # With an empty one anybody could sign.
        replace_file(path, secrets.token_bytes(SECRET_BYTES), aside, mode=0o600)
    return path.read_bytes()


def _stated(root: Path) -> int | None:
    try:
        files = os.listdir(root)
    except FileNotFoundError:
        return None
    numbers = (file.removeprefix(_PREFIX) for file in files if file.startswith(_PREFIX))
    return max((int(number) for number in numbers if number.isdecimal()), default=None)


def _guessed(root: Path) -> int | None:
    """The format of a store that was made before stores stated it."""
    if not (root / "names").is_dir():
        return None
    sealed = [
        _is_sealed(record) for record in itertools.islice((root / "names").glob("*/*.json"), _LOOKED_AT)
    ]
    return 1 if sealed and not any(sealed) else 2


def _is_sealed(record: Path) -> bool:
    with record.open("rb") as file:
        return file.read(_HASH_CHARS + 1)[-1:] == b"\n"
