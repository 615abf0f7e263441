"""A packed file that is still on its way: tensors are hashed as they come, beside the transfer."""

import threading
from collections.abc import Sequence

from adapter_store.errors import DataLoss
from adapter_store.files.hashing import bulk_hash
from adapter_store.files.safetensors_file import DamagedFile, TensorFile, TensorInfo, header_length
from adapter_store.manifest import Manifest
from adapter_store.packed.form import Weights, in_file_order

_NAME = "packed file"


class ArrivingWeights:
    """Whoever brings a part hashes what it completes: it is in that core's cache."""

    def __init__(self, content: memoryview, manifest: Manifest) -> None:
        """`content`: where the file arrives, in full size."""
        self._content, self._manifest = content, manifest
        self._file: TensorFile | None = None
        self._lock = threading.Lock()  # guards the next three
        self._ahead: dict[int, int] = {}  # parts behind a gap: begin -> end
        self._num_bytes = 0  # that are there without a gap
        self._awaited: list[tuple[int, TensorInfo]] = []  # numbered in file order, last first
        self._hashes: dict[int, str] = {}

    def arrived(self, begin: int, end: int) -> None:
        """These bytes are there. For any thread; parts come once and in any order. Raises DataLoss."""
        for number, tensor in self._completed(begin, end):
            self._hashes[number] = bulk_hash(self._content[tensor.begin : tensor.end])

    def finish(self) -> Weights:
        """All of it is there. Raises DataLoss."""
        if self._file is None:
            raise DataLoss(f"stored weights of {self._manifest.digest} are damaged: {_NAME} is cut short")
        return Weights(self._file, self._manifest, self._in_file_order)

    def _in_file_order(self) -> Sequence[str]:
        return [self._hashes[number] for number in range(len(self._hashes))]

    def _completed(self, begin: int, end: int) -> list[tuple[int, TensorInfo]]:
        with self._lock:
            self._ahead[begin] = end
            while (reached := self._ahead.pop(self._num_bytes, None)) is not None:
                self._num_bytes = reached
            if self._file is None:
                self._read_header()
            completed = []
            while self._awaited and self._awaited[-1][1].end <= self._num_bytes:
                completed.append(self._awaited.pop())
            return completed

    def _read_header(self) -> None:
        """If all of it is there."""
        if self._num_bytes < 8:
            return
        size = len(self._content)
        try:
            if self._num_bytes < 8 + header_length(_NAME, bytes(self._content[:8]), size):
                return
            self._file = TensorFile.in_memory(_NAME, self._content)
        except DamagedFile as error:
            raise DataLoss(f"stored weights of {self._manifest.digest} are damaged: {error}") from error
        self._awaited = list(enumerate(in_file_order(self._file)))[::-1]
