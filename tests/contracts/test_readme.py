"""The READMEs tell the truth: folders are named, commands parse, files exist, the Python example runs."""

import re
import shlex
from pathlib import Path

import pytest

from executor.config import load_config as load_executor
from lorafleet import Client
from lorafleet.cli import parser
from scheduler.config import load_config as load_scheduler
from tests.contracts.house import PACKAGES, ROOT, folders, line, name
from tests.support.adapters.peft import make_adapter, make_base
from tests.support.adapters.tokenizers import CHAT_TEMPLATE, byte_level, write_folder
from tests.support.services.fleet import running_fleet

README = (ROOT / "README.md").read_text()
READMES = [
    ROOT / "README.md",
    *(path for package in (*PACKAGES, "deploy") for path in sorted((ROOT / package).rglob("*.md"))),
]


def test_the_readme_is_one_page() -> None:
    assert len(README.splitlines()) <= 200


def test_every_folder_has_the_line_that_it_says_of_itself() -> None:
    listed = re.findall(r"^- `([\w/]+/)`: (.+)$", README, re.M)
    assert listed == [(name(folder), line(folder)) for folder in folders()]


@pytest.mark.parametrize("readme", READMES, ids=name)
def test_commands_parse(readme: Path) -> None:
    text = readme.read_text()
    for words in re.findall(r"^ +(?:LORAFLEET_TOKEN=\S+ )?lorafleet (.*)$", text, re.M):
        parser().parse_args(shlex.split(words))
    for service, flags in re.findall(r"^ +python -m (scheduler|executor) (.*)$", text, re.M):
        (load_scheduler if service == "scheduler" else load_executor)(shlex.split(flags), {})


@pytest.mark.parametrize("readme", READMES, ids=name)
def test_what_the_text_names_exists(readme: Path) -> None:
    text = readme.read_text()
    packages = "lorafleet|scheduler|executor|adapter_store|kernels|deploy|protos|tests"
    for path in re.findall(rf"`((?:{packages})/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path
    for module in re.findall(
        r"python -m ((?:lorafleet|scheduler|executor|adapter_store|kernels|tests)[\w.]*)", text
    ):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (readme.parent / link).exists(), link


def test_the_commands_of_all_services_are_shown() -> None:
    text = "".join(readme.read_text() for readme in READMES)
    for command in ("lorafleet serve", "python -m scheduler", "python -m executor"):
        assert f"    {command} " in text


def test_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^    |`)make ([a-z-]+)", README, re.M)):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_the_python_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_base(tmp_path / "model", vocab_size=448)
    write_folder(model, byte_level(), chat_template=CHAT_TEMPLATE)
    make_adapter(tmp_path / "my-peft-adapter", model, seed=1)
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    with running_fleet(model, tmp_path / "store", "--max-model-len", "160") as fleet:
        monkeypatch.chdir(tmp_path)
        exec(compile(example.replace("127.0.0.1:50051", fleet.target), "README.md", "exec"), {})
        with Client(fleet.target) as client:
            assert [model.adapter for model in client.models().adapters] == ["default/support@latest"]
    assert capsys.readouterr().out
