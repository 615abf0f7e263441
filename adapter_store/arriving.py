"""A packed file that is still on its way: tensors are hashed as they come, beside the transfer."""

from adapter_store.errors import DataLoss
from adapter_store.hashing import ParallelHashes
from adapter_store.manifest import Manifest
from adapter_store.packed import Weights, in_file_order
from adapter_store.safetensors_file import DamagedFile, TensorFile, TensorInfo, header_length

_NAME = "packed file"


class ArrivingWeights:
    def __init__(self, content: memoryview, manifest: Manifest, hashes: ParallelHashes) -> None:
        """`content`: where the file arrives, in full size."""
        self._content, self._manifest, self._hashes = content, manifest, hashes
        self._file: TensorFile | None = None
        self._awaited: list[TensorInfo] = []  # last first

    def arrived(self, num_bytes: int) -> None:
        """The first `num_bytes` are there. Raises DataLoss."""
        if self._file is None and not self._read_header(num_bytes):
            return
        while self._awaited and self._awaited[-1].end <= num_bytes:
            tensor = self._awaited.pop()
            self._hashes.add(self._content[tensor.begin : tensor.end])

    def finish(self) -> Weights:
        """All of it is there. Raises DataLoss."""
        self.arrived(len(self._content))
        if self._file is None:
            raise DataLoss(f"stored weights of {self._manifest.digest} are damaged: {_NAME} is cut short")
        return Weights(self._file, self._manifest, self._hashes.finish)

    def _read_header(self, num_bytes: int) -> bool:
        if num_bytes < 8:
            return False
        size = len(self._content)
        try:
            end = 8 + header_length(_NAME, bytes(self._content[:8]), size)
            if num_bytes < end:
                return False
            self._file = TensorFile.in_memory(_NAME, self._content)
        except DamagedFile as error:
            raise DataLoss(f"stored weights of {self._manifest.digest} are damaged: {error}") from error
        self._awaited = in_file_order(self._file)[::-1]
        return True
