"""Warnings on the wire, from what a template's trial finds to what clients and commands are told."""

import asyncio
import json
from pathlib import Path

import grpc
import pytest

from lorafleet import AsyncClient, Client, InvalidRequest, PushWarning
from lorafleet.cli import main
from lorafleet.v1 import adapters_pb2 as pb
from tests.support.services.adapters_calls import Running, as_, push
from tests.support.services.failures import failure_of
from tests.support.stores.media import versions_in

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONE_TURN = (
    "{{ messages[0].content }}{% if messages[2] %}{{ raise_exception('One turn\\ud800\\x1b') }}{% endif %}"
)
FAILS = (
    "chat_template.jinja: fails for a second message: the chat template says: One turn\\ud800\\x1b"  # escaped
)


def odd(service: Running, seed: int) -> dict[str, bytes]:
    """Of another base, and with a template for one turn."""
    files = service.content(seed, chat_template=ONE_TURN)
    config = json.loads(files["adapter_config.json"])
    return files | {"adapter_config.json": json.dumps(config | {"base_model_name_or_path": "a/b"}).encode()}


def folder_of(files: dict[str, bytes], folder: Path) -> Path:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


async def test_all_are_told_by_the_push_and_later_with_their_reasons(service: Running) -> None:
    pushed = (await push(service, "odd", odd(service, 31))).version
    told = [(each.reason, each.message) for each in pushed.push_warnings]
    assert {"OTHER_BASE_MODEL", "TEMPLATE_FAILS"} <= {reason for reason, _ in told}
    assert [message for reason, message in told if reason == "TEMPLATE_FAILS"] == [FAILS]
    assert list(pushed.warnings) == [message for _, message in told]  # for older clients
    found = (await service.stub.Get(pb.GetAdapterRequest(adapter="odd"), **as_("acme"))).version
    [listed] = (await service.stub.List(pb.ListAdaptersRequest(name="odd"), **as_("acme"))).versions
    assert pushed == found == listed


@pytest.mark.parametrize("dry_run", [False, True])
async def test_a_strict_push_refuses_them_by_reason(service: Running, dry_run: bool) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await push(service, "strict", odd(service, 32), strict=True, dry_run=dry_run)
    found = failure_of(caught.value)
    assert (found.code, found.reason) == ("INVALID_ARGUMENT", "WARNINGS_REFUSED")
    assert "OTHER_BASE_MODEL: adapter_config.json: " in found.message and FAILS in found.message
    assert versions_in(service.store, "acme", name="strict") == []


async def test_clients_get_reasons(service: Running, tmp_path: Path) -> None:
    folder, target = folder_of(odd(service, 33), tmp_path / "odd"), f"127.0.0.1:{service.port}"
    async with AsyncClient(target, token="acme") as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.adapters.push(folder, "client", strict=True)
        pushed = (await client.adapters.push(folder, "client")).version
        assert (await client.adapters.get("client")) == pushed
    assert caught.value.reason == "WARNINGS_REFUSED"
    refused = [(each.reason, each.description) for each in caught.value.violations]
    assert [PushWarning(*each) for each in refused] == list(pushed.warnings)
    assert f"TEMPLATE_FAILS: {FAILS}" in map(str, pushed.warnings)

    def pushed_by_the_plain_client() -> None:
        with (
            Client(target, token="acme") as client,
            pytest.raises(InvalidRequest, match="OTHER_BASE_MODEL: "),
        ):
            client.adapters.push(folder, "client", strict=True)

    await asyncio.to_thread(pushed_by_the_plain_client)


async def test_commands_tell_reason_and_message(
    service: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LORAFLEET_TOKEN", "acme")
    folder = folder_of(odd(service, 34), tmp_path / "command")

    async def run(*args: str, status: int = 0) -> tuple[str, str]:
        command = ["adapters", *args, "--target", f"127.0.0.1:{service.port}"]
        assert await asyncio.to_thread(main, command) == status
        return tuple(capsys.readouterr())

    _, err = await run("push", str(folder), "command", "--strict", status=1)
    assert err.splitlines()[-1].startswith("error: adapter: a strict push takes no warnings, and there are ")
    out, _ = await run("push-all", str(tmp_path), "--strict", "--jobs", "1", status=1)
    assert "command refused: adapter: a strict push" in out and f"TEMPLATE_FAILS: {FAILS}" in out
    _, err = await run("push-all", str(tmp_path))
    assert f"warning: command: TEMPLATE_FAILS: {FAILS}" in err.splitlines()
    _, err = await run("push", str(folder), "command")
    assert f"warning: TEMPLATE_FAILS: {FAILS}" in err.splitlines()
    out, _ = await run("show", "command")
    assert f"warning    TEMPLATE_FAILS: {FAILS}" in out.splitlines()
    out, _ = await run("show", "command", "--json")
    assert {"reason": "TEMPLATE_FAILS", "message": FAILS} in json.loads(out)["warnings"]
