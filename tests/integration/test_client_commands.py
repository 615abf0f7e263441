"""The commands that talk to a scheduler, in process, against a real server."""

import io
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorafleet import AsyncClient, Client, InvalidRequest, LoraFleetError, PushWarning
from lorafleet.cli import main
from lorafleet.v1 import adapters_pb2_grpc, inference_pb2_grpc
from tests.support.services.memory_adapters import ListingInference, MemoryAdapters
from tests.support.services.scripted_server import script, serving


@pytest.fixture
def store() -> MemoryAdapters:
    return MemoryAdapters()


@pytest.fixture
def inference() -> ListingInference:
    return ListingInference()


@pytest.fixture(autouse=True)
def target(
    store: MemoryAdapters, inference: ListingInference, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    def add(server: object) -> None:
        adapters_pb2_grpc.add_AdaptersServicer_to_server(store, server)
        inference_pb2_grpc.add_InferenceServicer_to_server(inference, server)

    with serving(add) as address:
        monkeypatch.setenv("LORAFLEET_TARGET", address)
        yield address


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(b"weights")
    return path


def leave_behind(folder: Path, count: int) -> None:
    """As a trainer does."""
    for number in range(count):
        (folder / f"checkpoint-{number}").mkdir()


def test_push_list_show_export_rm(
    folder: Path, store: MemoryAdapters, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["adapters", "push", str(folder), "acme/x"]) == 0
    out, err = capsys.readouterr()
    (digest,) = store.versions
    first, content = out.splitlines()
    assert first == f"acme/x@{digest} pushed, latest is generation 1"
    assert content.startswith("  modules: 1 (q_proj, layers: 1), rank 4, scale 2, ")
    assert "pushing acme/x" in err
    assert "warning: odd base" in err and "left out" not in err
    leave_behind(folder, 8)
    assert main(["adapters", "push", str(folder), "acme/x"]) == 0
    assert "left out, as it changes no answer: checkpoint-0, " in (err := capsys.readouterr().err)
    assert "checkpoint-5 and 2 more" in err

    assert main(["adapters", "list"]) == 0
    assert digest[:19] in capsys.readouterr().out
    assert main(["adapters", "show", "acme/x"]) == 0
    assert f"digest     {digest}" in capsys.readouterr().out

    assert main(["adapters", "export", "acme/x", str(tmp_path / "copy")]) == 0
    assert {p.name: p.read_bytes() for p in (tmp_path / "copy").iterdir()} == {
        p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()
    }
    capsys.readouterr()
    assert main(["adapters", "export", "acme/x", str(tmp_path / "copy")]) == 1
    assert "not an empty folder" in capsys.readouterr().err

    assert main(["adapters", "rm", "acme/x"]) == 0
    assert not store.versions
    capsys.readouterr()
    assert main(["adapters", "show", "acme/x"]) == 1
    assert capsys.readouterr().err == "error: no adapter acme/x; `lorafleet models` lists what you may use\n"


def test_every_adapters_command_speaks_json(
    folder: Path, store: MemoryAdapters, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*args: str) -> object:
        assert main(["adapters", *args, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert run("push", str(folder), "x", "--dry-run")["alias"] is None
    assert not store.versions
    pushed = run("push", str(folder), "x", "--alias", "a")
    digest = pushed["version"]["digest"]
    assert (pushed["created"], pushed["alias"]["alias"], pushed["alias"]["generation"]) == (True, "a", 1)
    (folder / "adapter_model.safetensors").write_bytes(b"other")
    run("push", str(folder), "x", "--alias", "")
    assert len(run("list")) == 2  # over two pages
    assert run("show", "x")["modules"] == [{"name": "layers.0.q_proj", "rank": 4, "scale": 2.0}]
    assert run("verify") == {"verified": 2, "damaged": {}, "orphans": []}
    assert run("export", "x", str(tmp_path / "copy"))["files"] == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert run("alias", "set", "default/x@b", digest)["alias"] == "b"
    assert [alias["alias"] for alias in run("alias", "list")] == ["a", "b"]
    assert run("alias", "rm", "default/x@b") == {"removed": "default/x@b"}
    assert run("rm", "x") == {"digest": digest}


def test_damage_and_a_moved_alias_are_failures(
    store: MemoryAdapters, capsys: pytest.CaptureFixture[str]
) -> None:
    store.damaged["sha256:bad"] = "layers.0.q_proj.lora_a differs"
    assert main(["adapters", "verify"]) == 1
    assert "damaged: sha256:bad: layers.0.q_proj.lora_a differs" in capsys.readouterr().out
    assert main(["adapters", "alias", "set", "x@a", "sha256:1", "--expected-generation", "3"]) == 1
    assert capsys.readouterr().err == "error: the alias has moved\n"


def test_push_of_no_adapter_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["adapters", "push", str(tmp_path / "none"), "x"]) == 1
    assert main(["adapters", "push", str(tmp_path), "x"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ") and "is no folder" in first
    assert second.startswith("error: adapter_config.json: is missing in ")


async def test_the_asyncio_client_pushes_lists_and_pulls(folder: Path, tmp_path: Path, target: str) -> None:
    async with AsyncClient(target) as client:
        seen: list[int] = []
        result = await client.adapters.push(
            folder, "acme/x", on_progress=lambda done, total: seen.append(done)
        )
        assert (result.created, seen[-1]) == (True, 9)
        assert await client.adapters.list("x") == (result.version,)
        copy = await client.adapters.pull("acme/x", tmp_path / "copy")
        assert (copy / "adapter_model.safetensors").read_bytes() == b"weights"
        assert [model.adapter for model in (await client.models()).adapters] == ["acme/a@x", "acme/b@y"]


async def test_a_scheduler_that_knows_neither_reasons_nor_strict_pushes(
    folder: Path, target: str, store: MemoryAdapters
) -> None:
    """What it warns of is told all the same, and nobody takes its answer for that of a strict push."""
    async with AsyncClient(target) as client:
        [warning] = (await client.adapters.push(folder, "acme/x")).version.warnings
        assert (warning, str(warning)) == (PushWarning("", "odd base"), "odd base")
        with pytest.raises(LoraFleetError, match=r"too old for strict pushes, .* with warnings: odd base"):
            await client.adapters.push(folder, "acme/x", strict=True)


async def test_archives_are_pushed_by_both_clients_and_the_command(
    folder: Path, tmp_path: Path, target: str, store: MemoryAdapters, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = Path(shutil.make_archive(str(tmp_path / "x"), "xztar", tmp_path, folder.name))
    async with AsyncClient(target) as client:
        digest = (await client.adapters.push(archive, "acme/x")).version.digest
    with Client(target) as client:
        assert client.adapters.push(archive, "acme/y").version.digest == digest
        (tmp_path / "other.7z").write_bytes(b"7z\xbc\xaf\x27\x1c")
        with pytest.raises(InvalidRequest, match="unpack it and push the folder"):
            client.adapters.push(tmp_path / "other.7z", "acme/y")
    assert main(["adapters", "push", str(archive), "acme/z"]) == 0
    assert f"acme/z@{digest} " in capsys.readouterr().out


async def test_a_file_that_vanishes_during_a_push_is_told(folder: Path, target: str) -> None:
    async with AsyncClient(target) as client:

        def remove(done: int, total: int) -> None:
            (folder / "adapter_model.safetensors").unlink()

        with pytest.raises(FileNotFoundError):
            await client.adapters.push(folder, "acme/x", on_progress=remove)


def test_a_file_that_vanishes_during_a_push_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lorafleet.commands import push

    class Removing:
        def bytes(self, label: str) -> object:
            return lambda done, total: (folder / "adapter_model.safetensors").unlink()

    monkeypatch.setattr(push, "ProgressBar", Removing)
    assert main(["adapters", "push", str(folder), "x"]) == 1
    assert "adapter_model.safetensors: No such file" in capsys.readouterr().err


def test_generate_streams_text_and_speaks_json(
    inference: ListingInference, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = script(["Bon", "jour"], [])
    assert main(["generate", prompt, "--adapter", "a", "--max-new-tokens", "5", "--stop", "x"]) == 0
    assert capsys.readouterr().out == "Bonjour\n"
    ((request,),) = inference.requests.values()
    assert (request.adapter, request.stopping.max_new_tokens) == ("a", 5)
    assert list(request.stopping.stop_sequences) == ["x"]

    monkeypatch.setattr(sys, "stdin", io.StringIO(prompt))
    assert main(["generate", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["text"], result["finish_reason"], result["token_ids"]) == ("Bonjour", "stop", [100, 101])


def test_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    assert "acme/b@y" in capsys.readouterr().out
    assert main(["models", "--json"]) == 0
    assert [m["adapter"] for m in json.loads(capsys.readouterr().out)["adapters"]] == ["acme/a@x", "acme/b@y"]
