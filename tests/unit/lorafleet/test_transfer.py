from pathlib import Path

import pytest

from lorafleet import DataLoss, InvalidRequest, adapter_operations
from lorafleet.transfer import PIECE_BYTES, UNSERVED_FILES, Download, left_out, push_messages
from lorafleet.v1 import adapters_pb2

HEADER = adapter_operations.push("acme/x", "latest", False, False, False, None).request


def adapter_folder(folder: Path, weights: bytes = b"w" * (2 * PIECE_BYTES + 5)) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes(b"{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "optimizer.pt").write_bytes(b"not for the server")
    return folder


def piece(name: str, data: bytes, total: int = 0) -> adapters_pb2.PullResponse:
    return adapters_pb2.PullResponse(chunk=adapters_pb2.FileChunk(name=name, data=data), total_bytes=total)


def test_a_push_is_the_header_and_then_the_files_in_pieces(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    folder = adapter_folder(tmp_path / "a")
    header, *pieces = push_messages(folder, HEADER, lambda done, total: seen.append((done, total)))
    assert header.header.adapter == "acme/x"
    assert header.header.alias == "latest"
    files: dict[str, bytes] = {}
    for message in pieces:
        assert len(message.chunk.data) <= PIECE_BYTES
        files[message.chunk.name] = files.get(message.chunk.name, b"") + message.chunk.data
    assert files == {
        name: (folder / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")
    }
    total = 2 + 2 * PIECE_BYTES + 5
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_an_empty_file_is_sent_for_the_server_to_judge(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "a")
    (folder / "chat_template.jinja").write_bytes(b"")
    _, *pieces = push_messages(folder, HEADER, None)
    assert [each.chunk.data for each in pieces if each.chunk.name == "chat_template.jinja"] == [b""]


def test_a_folder_that_is_no_adapter_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match="save_pretrained"):
        push_messages(tmp_path / "none", HEADER, None)
    folder = adapter_folder(tmp_path / "a")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(InvalidRequest, match="pickle") as caught:
        push_messages(folder, HEADER, None)
    assert caught.value.violations[0].field == "adapter_model.safetensors"
    (folder / "adapter_config.json").unlink()
    with pytest.raises(InvalidRequest, match=r"adapter_config\.json"):
        push_messages(folder, HEADER, None)


@pytest.mark.parametrize("depth", ["checkpoint-100", "runs/checkpoint-100"])
@pytest.mark.parametrize("rest", [(), ("adapter_config.json",), ("adapter_model.safetensors",)])
def test_an_adapter_further_below_is_named(tmp_path: Path, depth: str, rest: tuple[str, ...]) -> None:
    """`rest`: what lies in the pushed folder itself."""
    (tmp_path / depth).parent.mkdir(exist_ok=True)
    adapter_folder(tmp_path / depth)
    for name in rest:
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(InvalidRequest, match=f"there is an adapter in {depth}/: push that folder"):
        push_messages(tmp_path, HEADER, None)


def test_of_several_adapters_below_none_is_chosen(tmp_path: Path) -> None:
    for name in ("policy", "reference"):
        adapter_folder(tmp_path / name)
    with pytest.raises(InvalidRequest, match="adapters in policy/, reference/: push the one that is meant"):
        push_messages(tmp_path, HEADER, None)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("adapters.safetensors", "mlx-lm; `python -m adapter_store.convert"),
        ("lora.safetensors", "mistral-finetune; `python -m adapter_store.convert"),
        ("support-lora-f16.gguf", "llama.cpp"),
        ("pytorch_lora_weights.safetensors", "diffusers"),
        ("epoch=3.ckpt", "a checkpoint of torch, a pickle"),
        ("adapter_0.pt", "a checkpoint of torch, a pickle"),
    ],
)
def test_adapters_in_other_forms_are_told(tmp_path: Path, name: str, what: str) -> None:
    adapter_folder(tmp_path / "a").joinpath("adapter_model.safetensors").rename(tmp_path / "a" / name)
    with pytest.raises(InvalidRequest) as caught:
        push_messages(tmp_path / "a", HEADER, None)
    assert f"; {name} is " in caught.value.message and what in caught.value.message


@pytest.mark.parametrize("name", UNSERVED_FILES)
def test_weights_that_no_server_would_see_are_refused(tmp_path: Path, name: str) -> None:
    folder = adapter_folder(tmp_path / "a")
    assert left_out(folder) == ["optimizer.pt"]
    (folder / name).write_bytes(b"weights")
    with pytest.raises(InvalidRequest, match=f"{name}.*not served"):
        push_messages(folder, HEADER, None)


def test_a_download_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "x"
    with Download(target, None) as download:
        for message in (piece("a", b"12", 5), piece("a", b"3"), piece("b", b"45")):
            download.write(message)
        assert not target.exists()
        download.finish()
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {"a": b"123", "b": b"45"}
    assert [path.name for path in target.parent.iterdir()] == ["x"]


def test_a_failed_download_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataLoss, match="2 of 5 bytes"), Download(tmp_path / "x", None) as download:
        download.write(piece("a", b"12", 5))
        download.finish()
    with pytest.raises(KeyboardInterrupt), Download(tmp_path / "x", None) as download:
        download.write(piece("a", b"12", 5))
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", "..", ""])
def test_a_file_name_cannot_leave_the_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataLoss, match="file with the name"), Download(tmp_path / "x", None) as download:
        download.write(piece(name, b"12", 2))


def test_a_folder_with_files_is_not_touched(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "a")
    with pytest.raises(FileExistsError, match="not an empty folder"):
        Download(folder, None)
    assert len(list(folder.iterdir())) == 3
    (tmp_path / "empty").mkdir()
    with Download(tmp_path / "empty", None) as download:
        download.write(piece("a", b"1", 1))
        download.finish()
    assert (tmp_path / "empty" / "a").read_bytes() == b"1"
