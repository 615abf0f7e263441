"""Archives that nobody vouches for: one folder's files, plain names, bounded bytes, nothing elsewhere."""

import io
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from lorafleet import InvalidRequest
from lorafleet.archive import MAX_BYTES, adapter_folder, archive_stem

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LEFT_BEHIND = "out/non_lora_trainables.bin"
FILES = {CONFIG: b"{}", WEIGHTS: b"weights" * 1000}
TAR_MODES = {".gz": "w:gz", ".tgz": "w:gz", ".bz2": "w:bz2", ".xz": "w:xz"}


def write(path: Path, files: Mapping[str, bytes]) -> Path:
    if path.suffix.lower() == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as zipped:
            for name, data in files.items():
                zipped.writestr(name, data)
        return path
    with tarfile.open(path, TAR_MODES.get(path.suffix.lower(), "w")) as tar:  # type: ignore[call-overload]
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def taken(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, bytes]:
    with adapter_folder(path, max_bytes) as folder:
        found = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert not folder.exists()
    return found


def refusal(path: Path) -> str:
    with pytest.raises(InvalidRequest) as caught:
        taken(path)
    return caught.value.message


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz", "a.TGZ", "a.tar.bz2", "a.tar.xz", "a.ZIP"])
@pytest.mark.parametrize("prefix", ["", "checkpoint-300/", "./", "runs/last/"])
def test_an_adapter_is_taken_from_the_top_or_from_one_folder(tmp_path: Path, name: str, prefix: str) -> None:
    files = {prefix + file: data for file, data in FILES.items()}
    path = write(tmp_path / name, files | {prefix + "optimizer.pt": b"x", "deep/er/" + CONFIG: b"no"})
    assert archive_stem(name) == "a"
    assert taken(path) == FILES


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz"])
def test_what_a_file_holds_counts_and_not_its_name(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, FILES).rename(tmp_path / "download")
    assert taken(tmp_path / "download") == FILES


def test_a_folder_is_itself(tmp_path: Path) -> None:
    with adapter_folder(tmp_path) as folder:
        assert folder == tmp_path
    assert tmp_path.exists()


# ---- all files of one folder


@pytest.mark.parametrize("name", ["a.zip", "a.tar"])
@pytest.mark.parametrize(
    ("config", "weights"), [("", "checkpoint-100/"), ("a/", "b/"), ("checkpoint-100/", ""), ("a/b/", "a/")]
)
def test_parts_of_two_folders_are_no_adapter(tmp_path: Path, name: str, config: str, weights: str) -> None:
    path = write(tmp_path / name, {config + CONFIG: b"{}", weights + WEIGHTS: b"w"})
    where, there = (folder or "the top folder" for folder in (weights, config))
    assert refusal(path) == (
        f"{CONFIG}: is missing in {where} of {name}; there is one in {there}, but an adapter's files lie in "
        "one folder"
    )


@pytest.mark.parametrize("name", ["a.zip", "a.tar"])
def test_small_files_of_another_folder_stay_there(tmp_path: Path, name: str) -> None:
    own = {f"a/{file}": data for file, data in FILES.items()}
    path = write(tmp_path / name, own | {"chat_template.jinja": b"no", "b/tokenizer_config.json": b"{}"})
    assert taken(path) == FILES


@pytest.mark.parametrize("name", ["a.zip", "a.tar"])
def test_several_adapters_are_told(tmp_path: Path, name: str) -> None:
    several = {f"{step}/{file}": data for step in ("step-1", "out/step-2") for file, data in FILES.items()}
    assert refusal(write(tmp_path / name, several)) == (
        f"{name}: holds adapters in out/step-2/, step-1/: unpack it and push one of these folders"
    )
    (tmp_path / name).unlink()
    outer = {file: data[::-1] for file, data in FILES.items()}
    assert taken(write(tmp_path / name, several | outer)) == outer, "as a push of that folder"


def test_a_trainers_last_save_in_another_form_hides_behind_no_checkpoint(tmp_path: Path) -> None:
    files = {CONFIG: b"{}", "adapter_model.bin": b"pickle"} | {f"step-1/{k}": v for k, v in FILES.items()}
    assert f"{WEIGHTS}: is missing in the top folder of a.zip; there is one in step-1/" in refusal(
        write(tmp_path / "a.zip", files)
    )


@pytest.mark.parametrize(
    ("file", "hint"),
    [
        ("adapters.safetensors", "is an adapter of mlx-lm; `python -m adapter_store.convert"),
        ("lora.safetensors", "is an adapter of mistral-finetune; `python -m adapter_store.convert"),
        ("adapter_model.bin", "is a pickle, which is never loaded; `python -m adapter_store.convert"),
        ("lora-f16.gguf", "is llama.cpp's; push the PEFT folder"),
        ("model-00001-of-00002.safetensors", "is a whole model and no adapter"),
        ("notes.txt", ""),
    ],
)
def test_other_forms_are_told(tmp_path: Path, file: str, hint: str) -> None:
    text = refusal(write(tmp_path / "a.zip", {f"out/{CONFIG}": b"{}", f"out/{file}": b"w"}))
    assert text.startswith(f"{WEIGHTS}: is missing in ") and (f"; {file} {hint}" if hint else "a.zip") in text


# ---- what is not taken


def test_names_of_archives() -> None:
    assert archive_stem("Chat.v2.Tar.Zst") == "Chat.v2"
    assert archive_stem("a.7z") == "a" and archive_stem("zip") is None and archive_stem("a.gguf") is None


@pytest.mark.parametrize(
    ("start", "what"),
    [
        (b"7z\xbc\xaf\x27\x1c\x00\x04", "is a 7z archive"),
        (b"Rar!\x1a\x07\x01\x00", "is a RAR archive"),
        (b"\x28\xb5\x2f\xfd\x04\x58", "is compressed with zstd"),
    ],
)
@pytest.mark.parametrize("name", ["a.zip", "a.tar.zst", "a"])
def test_other_archives_are_refused_by_what_they_are(
    tmp_path: Path, name: str, start: bytes, what: str
) -> None:
    (tmp_path / name).write_bytes(start + bytes(1000))
    assert refusal(tmp_path / name) == f"{name}: {what}, which is not taken: unpack it and push the folder"


def test_passwords(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zip", FILES)
    data = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # of a member, here and in the directory
        data[data.index(mark) + offset] |= 1
    path.write_bytes(data)
    assert refusal(path) == (
        f"a.zip: {CONFIG} is encrypted, which is not taken: unpack it and push the folder"
    )


def test_a_compression_that_is_not_read(tmp_path: Path) -> None:
    """Explorer of Windows writes Deflate64 for large files."""
    path = write(tmp_path / "a.zip", FILES)
    data = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        data[data.index(mark) + offset] = 9
    path.write_bytes(data)
    assert "cannot be read (That compression method is not supported): unpack it" in refusal(path)


def test_links_and_special_members_are_refused(tmp_path: Path) -> None:
    """A link could bring any file of this machine into the adapter."""
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
        with tarfile.open(tmp_path / "a.tar", "w") as tar:
            info = tarfile.TarInfo(WEIGHTS)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        assert f"{WEIGHTS} is a link or a special file, which is not taken: unpack" in refusal(
            tmp_path / "a.tar"
        )
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as zipped:
        link = zipfile.ZipInfo(WEIGHTS)
        link.external_attr = 0o120777 << 16
        zipped.writestr(link, "/etc/passwd")
    assert f"{WEIGHTS} is a link, which is not taken" in refusal(tmp_path / "a.zip")


@pytest.mark.parametrize("name", ["a.zip", "a.tar"])
def test_weights_that_would_be_left_behind_are_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, {f"out/{file}": data for file, data in FILES.items()} | {LEFT_BEHIND: b"w"})
    assert "non_lora_trainables.bin: holds weights" in refusal(path)


@pytest.mark.parametrize("name", ["a.zip", "a.tar"])
@pytest.mark.parametrize("out", ["../", "/etc/", "a/../", "../../"])
def test_paths_that_lead_out_are_not_followed(tmp_path: Path, name: str, out: str) -> None:
    path = write(tmp_path / name, {out + file: data for file, data in FILES.items()})
    before = sorted(tmp_path.rglob("*"))
    assert taken(path) == FILES
    assert sorted(tmp_path.rglob("*")) == before


def test_paths_of_windows(tmp_path: Path) -> None:
    assert taken(write(tmp_path / "a.zip", {f"out\\{file}": data for file, data in FILES.items()})) == FILES


@pytest.mark.parametrize("name", ["bomb.zip", "bomb.tar.gz"])
def test_a_bomb_is_given_up_in_time(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, {CONFIG: b"{}", WEIGHTS: bytes(50_000_000)})
    assert path.stat().st_size < 200_000
    with pytest.raises(InvalidRequest, match="more than is allowed"):
        taken(path, 1_000_000)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", ["a.zip", "a.tar"])
def test_a_file_that_is_there_twice_is_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, FILES | {f"./{CONFIG}": b"[]"})
    assert f"has {CONFIG} twice in the top folder" in refusal(path)


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz", "a"])
@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04" + bytes(50)])
def test_what_is_no_archive_is_refused_by_name(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert refusal(tmp_path / name).startswith(f"{name}: can")


def test_a_file_of_weights_is_no_folder(tmp_path: Path) -> None:
    for name, hint in (
        ("lora.gguf", "llama.cpp"),
        ("adapters.safetensors", "mlx-lm"),
        (WEIGHTS, "no folder"),
    ):
        (tmp_path / name).write_bytes(b"weights" * 100)
        assert hint in refusal(tmp_path / name)


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tar.bz2", "a.tar.xz", "a.zip"])
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_archive_is_refused(tmp_path: Path, name: str, damage: str) -> None:
    noise = b"".join(i.to_bytes(4, "little") for i in range(5000))
    path = write(tmp_path / name, {CONFIG: b"{}", WEIGHTS: noise})
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[-len(data) // 3 :]
    else:
        for at in range(len(data) // 2, len(data) // 2 + 40):
            data[at] ^= 0x55
    path.write_bytes(data)
    assert refusal(path).startswith(f"{name}: can")
