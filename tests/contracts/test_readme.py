"""The READMEs tell the truth: every file is named, every command parses, the Python example runs."""

import re
import shlex
from pathlib import Path

import pytest

from executor.config import load_config as load_executor
from lorafleet import Client
from lorafleet.cli import parser
from scheduler.config import load as load_scheduler
from tests.support.adapters.peft import make_adapter, make_base
from tests.support.adapters.tokenizers import CHAT_TEMPLATE, byte_level, write_folder
from tests.support.services.fleet import running_fleet

ROOT = Path(__file__).parents[2]
PACKAGES = ("lorafleet", "scheduler", "executor", "adapter_store", "kernels")
README = (ROOT / "README.md").read_text()


def test_every_file_has_its_line() -> None:
    listed: set[str] = set()
    folder = ""
    for line in README[README.index("## Every file") :].splitlines():
        if heading := re.match(r"\*\*`(.+/)`\*\*", line):
            folder = heading[1]
        elif item := re.match(r"- `(\w+\.py)` \S", line):
            listed.add(folder + item[1])
    existing = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py" and "v1" not in path.parts
    }
    assert listed == existing


@pytest.mark.parametrize("readme", ["README.md", "deploy/README.md", "lorafleet/bench/README.md"])
def test_commands_parse(readme: str) -> None:
    lines = re.findall(r"^ +(?:LORAFLEET_TOKEN=\S+ )?lorafleet (.*)$", (ROOT / readme).read_text(), re.M)
    assert lines
    for line in lines:
        parser().parse_args(shlex.split(line))


def test_services_take_their_flags() -> None:
    text = README + (ROOT / "lorafleet/bench/README.md").read_text()
    lines = re.findall(r"^ +python -m (scheduler|executor) (.*)$", text, re.M)
    assert {service for service, _ in lines} == {"scheduler", "executor"}
    for service, flags in lines:
        (load_scheduler if service == "scheduler" else load_executor)(shlex.split(flags), {})


def test_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^    |`)make ([a-z-]+)", README, re.M)):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_files_that_the_text_names_exist() -> None:
    named = re.findall(
        r"`((?:lorafleet|scheduler|executor|adapter_store|kernels|deploy|protos)/[\w./]+)`", README
    )
    assert named
    for name in named:
        assert (ROOT / name).exists(), name


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
