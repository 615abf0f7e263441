"""What is the same in old stores of every medium: records, and which files a name may be given."""

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from adapter_store.errors import DataLoss
from adapter_store.files.hashing import bulk_hash
from adapter_store.manifest import Manifest, TextRules
from adapter_store.packed.form import Weights, content_digest
from adapter_store.peft.config import CONFIG_FILE, HONOURED
from adapter_store.peft.folder import WEIGHTS_FILE
from adapter_store.peft.tokenizer import TEMPLATE_FILE
from adapter_store.pushed import PushedFiles
from adapter_store.record import NameRecord, not_found
from adapter_store.ref import Ref
from adapter_store.summary import Summary, is_shown, lines_of, parse_lines

HASHES: Mapping[int, Callable[[memoryview], str]] = {  # of data, by format
    2: lambda data: hashlib.sha256(data).hexdigest(),
    3: bulk_hash,
}
_log = logging.getLogger(__name__)


class OldStore(ABC):
    """The part of an AdapterStore (../store.py) that a migration reads.

    It kept the files of whoever pushed a content first, for all who pushed it, so it cannot be told whose
    they are where several tenants have it, or one may whose record cannot be read: then those get a copy
    without what does not change answers. So does a name that called the base otherwise than the files do:
    who pushed them first is gone.
    """

    def __init__(self, number: int) -> None:
        """`number`: of its format. Raises StoreUnavailable."""
        self.number = number
        self._damaged: set[tuple[str, str]] = set()  # (tenant, name) of records that cannot be read
        self._records = {name: record for name in self._names() if (record := self._readable(*name))}
        self._tenants: dict[str, set[str]] = {}  # by digest
        for (tenant, _), record in self._records.items():
            for digest in record.versions:
                self._tenants.setdefault(digest, set()).add(tenant)

    def tenants(self) -> list[str]:
        return sorted({tenant for tenant, _ in (*self._records, *self._damaged)})

    def damaged(self, tenant: str) -> list[str]:
        """Names whose records cannot be read."""
        return sorted(name for owner, name in self._damaged if owner == tenant)

    def record(self, tenant: str, name: str) -> NameRecord:
        return self._records.get((tenant, name), NameRecord())

    def summaries(self, tenant: str, *, after: str = "", limit: int = 100) -> list[Summary]:
        """The first `limit` versions whose "name@digest" is greater than `after`, but for deleted ones."""
        lines = sorted(
            line
            for (owner, name), record in self._records.items()
            if owner == tenant
            for line in lines_of(name, record)
            if is_shown(line, deleted=False)
        )
        return [each for each in parse_lines(tenant, lines) if each.key > after][:limit]

    def pushed(self, ref: Ref) -> PushedFiles | None:
        """None: the files of the first push of a content were never replaced."""
        return None

    def export(self, ref: Ref, target: Path) -> None:
        """Writes the pushed files of the version in a digest ref into `target`, a new folder. That they are
        that version's shows when they are stored again. Raises AdapterNotFound, DataLoss."""
        entry, digest = self.record(ref.tenant, ref.name).versions.get(ref.digest or ""), str(ref.digest)
        if entry is None:
            raise not_found(ref)
        target.mkdir()
        self._write_files(digest, target)
        owners = self._tenants[digest] | {tenant for tenant, _ in self._damaged}
        base = _config(target).get("base_model_name_or_path") or ""
        if owners != {ref.tenant} or base != entry.push.base_model:
            _leave_out(target, read_manifest(self._manifest_text(digest)), entry.push.base_model)

    @abstractmethod
    def _names(self) -> Iterator[tuple[str, str]]:
        """(tenant, name) of all records."""

    @abstractmethod
    def _record_text(self, tenant: str, name: str) -> str:
        """Raises DataLoss."""

    @abstractmethod
    def _manifest_text(self, digest: str) -> str:
        """Raises AdapterNotFound, DataLoss."""

    @abstractmethod
    def _write_files(self, digest: str, target: Path) -> None:
        """Raises AdapterNotFound, DataLoss."""

    def _readable(self, tenant: str, name: str) -> NameRecord | None:
        try:
            return _record(self._record_text(tenant, name))
        except DataLoss as error:  # the others are copied all the same
            _log.error("adapter store: %s/%s is not copied: %s", tenant, name, error)
            self._damaged.add((tenant, name))
            return None


def old_digest(weights: Weights, number: int) -> str:
    """The digest of the same content in a store of format `number`."""
    entries = [
        (tensor.name, tensor.dtype, tensor.shape, HASHES[number](data))
        for tensor, data in weights.raw_tensors()
    ]
    manifest = weights.manifest
    return content_digest(entries, manifest.modules, manifest.chat_template, TextRules())


def _record(text: str) -> NameRecord:
    """Raises DataLoss."""
    try:
        fields = json.loads(text)
        for entry in fields["versions"].values():
            entry["push"] = {"base_model": entry.pop("base_model", "")}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataLoss(f"a stored record of versions and aliases is damaged: {error!r}") from error
    return NameRecord.from_json(json.dumps(fields))


def read_manifest(text: str) -> Manifest:
    """Raises DataLoss."""
    try:
        fields = json.loads(text)
        told = {key: fields[key] for key in fields if key not in ("base_model", "peft_version", "warnings")}
    except (ValueError, TypeError) as error:
        raise DataLoss(f"a stored manifest is damaged: {error!r}") from error
    return Manifest.from_json(json.dumps(told))


def _leave_out(folder: Path, manifest: Manifest, base_model: str) -> None:
    """All that may be another tenant's: of the config what does not change answers, names in the header of
    the weights, and all files but these two. `base_model`: what this name's own push called it."""
    told = _config(folder)
    config = {key: value for key, value in told.items() if key in HONOURED and key != "peft_version"}
    config["base_model_name_or_path"] = base_model
    for file in folder.iterdir():
        if file.name != WEIGHTS_FILE:
            file.unlink()
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    if manifest.chat_template is not None:
        (folder / TEMPLATE_FILE).write_text(manifest.chat_template, encoding="utf-8")
    _without_metadata(folder / WEIGHTS_FILE)


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8-sig"))
    return config


def _without_metadata(path: Path) -> None:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        aside = path.with_name("aside")
        with aside.open("wb") as target:
            target.write(len(text).to_bytes(8, "little") + text)
            while data := file.read(1 << 20):
                target.write(data)
    aside.rename(path)
