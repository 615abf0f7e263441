"""Damaged files (pointers, cuts, lying headers) are refused early, in bounded memory."""

import json
import os
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save, save_file

from adapter_store.files.safetensors_file import MAX_HEADER_BYTES, DamagedFile, TensorFile, read_header


def encoded(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(begin: int, end: int, shape: list[Any] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [(end - begin) // 4] if shape is None else shape,
        "data_offsets": [begin, end],
    }


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "cut short"),
        (b"\x02\0\0", "cut short"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "Git LFS pointer"),
        (pickle.dumps({"a": 1}), "cut short"),
        (encoded({}, length=2**60), "cut short"),
        (encoded({"t": tensor(0, 8)}, b"\0" * 4), "holds"),
        (encoded({"t": tensor(0, 8)}, b"\0" * 9), "holds"),
        (encoded({"t": tensor(4, 8)}, b"\0" * 8), "'t' overlaps another one or leaves a hole"),
        (encoded({"t": tensor(0, 8), "u": tensor(4, 12)}, b"\0" * 12), "'u' overlaps"),
        (
            encoded({"t": tensor(0, 4), "u": tensor(8, 12)}, b"\0" * 12),
            "'u' overlaps another one or leaves a hole",
        ),
        (encoded({"t": tensor(8, 0, [2])}, b"\0" * 8), "'t': offsets"),
        (encoded({"t": tensor(0, 8, [2**32, 2**32])}, b"\0" * 8), "'t': offsets"),
        (encoded({"t": tensor(0, 8, [-1, -2])}, b"\0" * 8), "'t' has an impossible shape"),
        (encoded({"t": tensor(0, 8, [True, 2])}, b"\0" * 8), "'t' has an impossible shape"),
        (encoded({"t": tensor(0, 8, [1] * 9 + [2])}, b"\0" * 8), "'t' has an impossible shape"),
        (encoded({"t": tensor(0, 8, dtype="F32 ")}, b"\0" * 8), "unknown dtype"),
        (encoded(b'{"t":{"dtype":"F32","shape":[2],"data_offsets":[0,1e1]}}', b"\0" * 8), "impossible"),
        (encoded({"t": {"dtype": "F32", "shape": [2]}}, b"\0" * 8), "'t' needs exactly"),
        (encoded({"t": tensor(0, 8) | {"extra": 1}}, b"\0" * 8), "'t' needs exactly"),
        (encoded({"t": 3}), "'t' needs exactly"),
        (encoded([]), "not a JSON object"),
        (encoded(b"{" * 100_000), "not valid JSON"),
        (encoded(b"[" * 100_000), "not valid JSON"),
        (encoded(b'{"t": ' + b"9" * 5000 + b"}"), "not valid JSON"),
        (encoded(b"\xff\xfe{}"), "not valid JSON"),
        (encoded({"__metadata__": {"a": 1}}), "__metadata__"),
        (
            encoded(b'{"t":%b,"t":%b}' % ((json.dumps(tensor(0, 4)).encode(),) * 2), b"\0" * 4),
            "'t' appears twice",
        ),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    """Pointers of large-file storage, cut uploads, pickles, and headers that say what cannot be."""
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(content)
    with pytest.raises(DamagedFile, match=complaint) as refusal:
        read_header(file)
    assert "adapter_model.safetensors" in str(refusal.value)


def test_a_huge_header_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "big.safetensors"
    with file.open("wb") as out:
        out.write((1 << 30).to_bytes(8, "little"))
        out.truncate(2 << 30)  # sparse
    tracemalloc.start()
    try:
        with pytest.raises(DamagedFile, match=str(MAX_HEADER_BYTES)):
            read_header(file)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_cut_file_is_refused(tmp_path: Path, dense_adapter: Path) -> None:
    whole = (dense_adapter / "adapter_model.safetensors").read_bytes()
    file = tmp_path / "cut.safetensors"
    for size in (7, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(DamagedFile):
            read_header(file)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_special_files_are_refused_without_waiting(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "special")
    with pytest.raises(DamagedFile, match="not a regular file"):
        read_header(tmp_path / "special")


def test_views_are_read_only_and_outlive_the_file(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    save_file({"t": values, "empty": np.zeros((0, 2), np.float16)}, tmp_path / "f.safetensors")
    view = TensorFile.open(tmp_path / "f.safetensors").array("t")
    (tmp_path / "f.safetensors").unlink()
    assert np.array_equal(view, values)
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 1


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "f.safetensors"


WHOLE = save({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float16)}, metadata={"k": "v"})


@given(
    st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=4),
    st.data(),
)
def test_whatever_is_accepted_the_formats_own_library_accepts_too(
    fuzzed: Path, edits: list[tuple[int, int]], data: st.DataObject
) -> None:
    content = bytearray(WHOLE)
    for position, value in edits:
        content[position] = value
    fuzzed.write_bytes(content[: data.draw(st.integers(len(WHOLE) - 3, len(WHOLE)))])
    try:
        header = read_header(fuzzed)
    except DamagedFile:
        return
    with safe_open(fuzzed, "np") as theirs:
        assert set(theirs.keys()) == header.tensors.keys()
