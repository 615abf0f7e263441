"""What the command says to a mistyped name, and that it tells nothing of names that are hidden."""

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from adapter_store import open_store
from adapter_store.record import NameRecord
from lorafleet.cli import main
from lorafleet.commands import near
from scheduler.adapters.catalogue import Catalogue
from scheduler.bench.fill import fill_folder, names
from tests.support.adapters.peft import make_base
from tests.support.adapters.tokenizers import byte_level, write_folder
from tests.support.services.scheduler_house import open_house

SEEN = ("chat-de", "chat-en", "chat-fr", "support")
HIDDEN = ("chit-es", "secret")
FEW = "; `lorafleet models` lists what you may use\n"


def records(wanted: Sequence[str]) -> Iterator[tuple[str, NameRecord]]:
    for name, (_, record) in zip(wanted, names(len(wanted)), strict=True):
        stable = {"stable": replace(record.aliases["latest"], generation=7)}
        yield name, NameRecord(record.versions, {**record.aliases, **stable})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_base(tmp_path_factory.mktemp("near") / "model", vocab_size=448)
    write_folder(model, byte_level())
    open_store(str(model.parent / "store"))
    fill_folder(model.parent / "store", "acme", records(SEEN + HIDDEN))
    fill_folder(model.parent / "store", "crowd", names(2 * near.PAGE + 1))
    fill_folder(model.parent / "store", "crowd", records(["support-team"]))
    callers = {"guest": '["acme/chat-*", "acme/support"]', "owner": '["*/*"]'}
    (model.parent / "tokens").write_text(
        "".join(
            f'[[tokens]]\nsha256 = "{hashlib.sha256(token.encode()).hexdigest()}"\ntenant = "acme"\n'
            f'rights = ["infer", "push", "manage"]\nadapters = {patterns}\n'
            for token, patterns in callers.items()
        )
    )
    return model


@pytest.fixture
def said(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """What the command says to each ref, as that caller."""

    def run(caller: str, *refs: str, command: tuple[str, ...] = ("adapters", "show")) -> list[str]:
        async def ask() -> list[str]:
            async with open_house(model, tokens_file=model.parent / "tokens") as house:
                monkeypatch.setenv("LORAFLEET_TARGET", house.scheduler.address)
                monkeypatch.setenv("LORAFLEET_TOKEN", caller)
                texts = []
                for ref in refs:
                    assert await asyncio.to_thread(main, [*command, ref]) == 1
                    texts.append(capsys.readouterr().err)
                return texts

        return asyncio.run(ask())

    return run


def test_near_names_and_aliases_are_told(said: Callable[..., list[str]]) -> None:
    assert said("owner", "suport", "acme/chat-d", "support@stabel", "acme/support@sha256:" + "0" * 64) == [
        "error: there is no adapter 'suport'; did you mean support?\n",
        "error: there is no adapter 'acme/chat-d'; did you mean acme/chat-de or acme/chat-fr or acme/chat-en?"
        "\n",
        "error: there is no adapter 'support@stabel'; did you mean support@stable or support@latest?\n",
        f"error: there is no adapter 'acme/support@sha256:{'0' * 64}'; did you mean acme/support@stable or "
        "acme/support@latest?\n",
    ]
    assert said("owner", "zzz", "nobody/support") == [
        f"error: there is no adapter '{ref}'{FEW}" for ref in ("zzz", "nobody/support")
    ]
    ask = ("generate", "hello", "--adapter")
    assert said("owner", "suport", command=ask) == [
        "error: there is no adapter 'suport'; did you mean support?\n"
    ]


def test_a_hidden_name_is_answered_as_a_missing_one(said: Callable[..., list[str]]) -> None:
    """Neither is what is near to it told, nor that it is there."""
    hidden, missing, far, gone = said("guest", "chit-es", "chit-ex", "secret", "sacred")
    assert hidden.replace("chit-es", "chit-ex") == missing
    assert "did you mean chat-" in missing and "chit-es" not in missing
    assert far == f"error: there is no adapter 'secret'{FEW}" == gone.replace("sacred", "secret")
    near_hidden, alias = said("guest", "secrt", "secret@stable")
    assert near_hidden.endswith(FEW) and alias.endswith(FEW)


def test_of_a_crowd_only_the_neighbours_are_listed(
    said: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = list[int]()
    listed = Catalogue.List

    async def counted(self, request, context):  # type: ignore[no-untyped-def]
        response = await listed(self, request, context)
        pages.append(len(response.versions))
        return response

    monkeypatch.setattr(Catalogue, "List", counted)
    assert said("owner", "crowd/support-taem") == [
        "error: there is no adapter 'crowd/support-taem'; did you mean crowd/support-team?\n"
    ]
    assert pages and len(pages) <= 2 * 3, "each listing has one page on its way ahead"
