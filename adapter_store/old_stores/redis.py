"""A namespace of format 2 or 3: one upload holds a content and the files of its first push."""

from collections.abc import Iterator
from pathlib import Path

from adapter_store.errors import AdapterNotFound, DataLoss
from adapter_store.files.durable import medium_errors
from adapter_store.files.hashing import bulk_hash
from adapter_store.files.safetensors_file import DamagedFile, TensorFile
from adapter_store.old_stores.old_store import HASHES, OldStore, read_manifest
from adapter_store.packed.form import Weights
from adapter_store.packed.recipe import HASH_BYTES, rebuild
from adapter_store.peft.folder import WEIGHTS_FILE
from adapter_store.redis_store.index import Index, StoredFile
from adapter_store.redis_store.keys import Keys, unseal
from adapter_store.redis_store.primary import Primary
from adapter_store.redis_store.scan import scan
from adapter_store.redis_store.upload import UNHASHED
from adapter_store.redis_store.url import RedisUrl

_PACKED, _RECIPE, _SOURCE = "packed.safetensors", "recipe", "source/"


class OldRedisStore(OldStore):
    def __init__(self, url: RedisUrl, number: int) -> None:
        self._primary, self._keys = Primary(url), Keys(url.namespace)
        super().__init__(number)

    def _names(self) -> Iterator[tuple[str, str]]:
        prefix = self._keys.record("", "")[:-1]
        for key in sorted(set(scan(self._primary, f"{prefix}*"))):
            tenant, _, name = key.removeprefix(prefix).partition("/")
            yield tenant, name

    def _record_text(self, tenant: str, name: str) -> str:
        key = self._keys.record(tenant, name)
        [value] = self._primary.run(("GET", key))
        return unseal(key, value or b"")

    def _manifest_text(self, digest: str) -> str:
        return self._field(digest, "manifest")

    def _write_files(self, digest: str, target: Path) -> None:
        index = Index.from_json(self._field(digest, "index"))
        files = {file.name: self._content(index, file) for file in index.files}
        for name, content in files.items():
            if name.startswith(_SOURCE):
                with medium_errors():
                    (target / name.removeprefix(_SOURCE)).write_bytes(content)
        manifest = read_manifest(self._manifest_text(digest))
        try:
            packed = TensorFile.in_memory(_PACKED, memoryview(files[_PACKED]))
        except DamagedFile as error:
            raise DataLoss(f"stored weights of {digest} are damaged: {error}") from error
        with (
            Weights(packed, manifest, None) as weights,
            medium_errors(),
            (target / WEIGHTS_FILE).open("wb") as file,
        ):
            rebuild(self._recipe(files[_RECIPE]), weights, file)

    def _recipe(self, old: bytes) -> memoryview:
        """The recipe as they are today: behind today's hash."""
        expected, body = old[:HASH_BYTES], memoryview(old)[HASH_BYTES:]
        if bytes.fromhex(HASHES[self.number](body)) != expected:
            raise DataLoss("a stored recipe is damaged")
        return memoryview(bytes.fromhex(bulk_hash(body)) + body)

    def _content(self, index: Index, file: StoredFile) -> bytes:
        chunks = []
        for number, expected in zip(index.numbers(file), file.chunks, strict=True):
            [chunk] = self._primary.run(("GET", self._keys.chunk(index.digest, index.upload, number)))
            if chunk is None or (expected != UNHASHED and HASHES[self.number](chunk) != expected):
                raise DataLoss(f"a part of {file.name} of {index.digest} is damaged")
            chunks.append(chunk)
        return b"".join(chunks)

    def _field(self, digest: str, field: str) -> str:
        key = self._keys.blob(digest)
        [value] = self._primary.run(("HGET", key, field))
        if value is None:
            raise AdapterNotFound(f"adapter version {digest} was not found")
        return unseal(f"{key} {field}", value)
