"""Archives that nobody vouches for: plain names only, bounded bytes, nothing written elsewhere."""

import io
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from lorafleet import InvalidRequest
from lorafleet.archive import is_archive, unpacked

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LEFT_BEHIND = "out/non_lora_trainables.bin"
FILES = {CONFIG: b"{}", WEIGHTS: b"weights" * 1000}


def write(path: Path, files: Mapping[str, bytes]) -> Path:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as zipped:
            for name, data in files.items():
                zipped.writestr(name, data)
        return path
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def taken(path: Path, **options: int) -> dict[str, bytes]:
    with unpacked(path, **options) as folder:
        found = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert not folder.exists()
    return found


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz", "a.tgz"])
@pytest.mark.parametrize("prefix", ["", "checkpoint-300/", "./"])
def test_an_adapter_is_taken_from_the_top_or_from_one_folder(tmp_path: Path, name: str, prefix: str) -> None:
    files = {prefix + file: data for file, data in FILES.items()}
    path = write(tmp_path / name, files | {prefix + "optimizer.pt": b"x", "deep/er/" + CONFIG: b"no"})
    assert is_archive(path)
    assert taken(path) == FILES


@pytest.mark.parametrize("name", ["a.zip", "a.tar"])
def test_weights_that_would_be_left_behind_are_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, {f"out/{file}": data for file, data in FILES.items()} | {LEFT_BEHIND: b"w"})
    with pytest.raises(InvalidRequest, match=r"non_lora_trainables\.bin.*not served"):
        taken(path)


@pytest.mark.parametrize("name", ["a.zip", "a.tar"])
@pytest.mark.parametrize("evil", ["../" + CONFIG, "/etc/" + CONFIG, "a/../" + CONFIG, "../../" + CONFIG])
def test_paths_that_lead_out_are_not_followed(tmp_path: Path, name: str, evil: str) -> None:
    path = write(tmp_path / name, {evil: b"evil", WEIGHTS: b"w"})
    before = sorted(tmp_path.rglob("*"))
    assert taken(path).get(CONFIG) in (None, b"evil")
    assert sorted(tmp_path.rglob("*")) == before


def test_links_and_special_members_are_not_taken(tmp_path: Path) -> None:
    """A link could bring any file of this machine into the adapter."""
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, kind in (
            (CONFIG, tarfile.SYMTYPE),
            (WEIGHTS, tarfile.LNKTYPE),
            ("tokenizer.json", tarfile.FIFOTYPE),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    assert taken(tmp_path / "a.tar") == {}


@pytest.mark.parametrize("name", ["bomb.zip", "bomb.tar.gz"])
def test_a_bomb_is_given_up_in_time(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, {CONFIG: b"{}", WEIGHTS: bytes(50_000_000)})
    assert path.stat().st_size < 200_000
    with pytest.raises(InvalidRequest, match="more than is allowed"), unpacked(path, 1_000_000):
        pass


def test_a_file_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zip", {CONFIG: b"{}", "x/" + CONFIG: b"[]"})
    with pytest.raises(InvalidRequest, match="twice"), unpacked(path):
        pass


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz"])
@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04" + bytes(50)])
def test_what_is_no_archive_is_refused_by_name(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=name), unpacked(path):
        pass


def test_a_damaged_member_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar.gz", FILES)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InvalidRequest), unpacked(path):
        pass
