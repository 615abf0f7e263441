"""Kernels are compiled by several processes at a first start, and only then."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import kernels
from executor import start_log
from executor.config import ExecutorConfig
from executor.gpu.compile_ahead import Command, Compilation
from executor.gpu.compile_process import cut_to_one_layer
from executor.models import read_config
from tests.support.adapters.moe_models import make_moe_base
from tests.support.services.cluster import wait_until
from tests.support.services.processes import children, environment, is_running


class Processes:
    def __init__(self) -> None:
        self.started: list[tuple[Command, dict[str, object]]] = []
        self.failure = ""

    def __call__(self, command: Command, settings: str) -> str:
        self.started.append((command, json.loads(settings)))
        return self.failure


@pytest.fixture
def config(tmp_path: Path) -> Iterator[ExecutorConfig]:
    (tmp_path / "config.json").write_text("{}")
    yield ExecutorConfig(model=str(tmp_path), store="redis://:secret@host", compile_processes=3)


def test_each_process_has_its_part_and_no_secrets(config: ExecutorConfig, tmp_path: Path) -> None:
    processes = Processes()
    Compilation(config, tmp_path).start(processes)
    shares = sorted(tuple(command[-2:]) for command, _ in processes.started)
    others = [("attention", "fa2"), ("attention", "fa3"), ("sampler", "all")]
    assert shares == [("0", "3"), ("1", "3"), ("2", "3"), *others]
    assert "secret" not in str(processes.started)
    for _, settings in processes.started:
        settings["lora_modules"] = tuple(settings["lora_modules"])  # type: ignore[arg-type]
        assert ExecutorConfig(**settings) == replace(config, store="unused")  # type: ignore[arg-type]


def test_the_log_says_what_is_compiled_and_what_is_left(
    config: ExecutorConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvcc's part of attention, too, which takes longest."""
    caplog.set_level("INFO")
    monkeypatch.setattr(start_log, "EVERY_S", 0.001)
    left = (
        "2 of 6 done, not yet: FlashInfer's fa2 (nvcc), FlashInfer's fa3 (nvcc), part 1 of Triton's, part 2"
    )

    def run(command: Command, settings: str) -> str:
        if command[-2:] not in (("sampler", "all"), ("2", "3")):
            wait_until(lambda: any(left in message for message in caplog.messages), "it is told")
        return ""

    Compilation(config, tmp_path).start(run)
    assert caplog.messages[0] == "start: compiling kernels, as none are yet, in processes (6)"
    assert caplog.messages[-1].startswith("start: compiling kernels, as none are yet, in processes took ")


def test_a_start_like_one_before_starts_none(config: ExecutorConfig, tmp_path: Path) -> None:
    processes, cache = Processes(), tmp_path / "cache"
    Compilation(config, cache).start(processes)
    Compilation(config, cache).start(processes)
    assert len(processes.started) == 12, "the executor did not become ready in between"
    Compilation(config, cache).done()
    Compilation(config, cache).start(processes)
    Compilation(replace(config, store="other", listen="127.0.0.1:1"), cache).start(processes)
    assert len(processes.started) == 12
    Compilation(replace(config, max_lora_rank=8), cache).start(processes)
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    Compilation(config, cache).start(processes)
    assert len(processes.started) == 24


def test_another_flashinfer_is_compiled_again(
    config: ExecutorConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = Processes()
    for name in ("flashinfer_python-8.0", "flashinfer_python-9.0"):
        metadata = tmp_path / name / f"{name}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text("Metadata-Version: 2.1\nName: flashinfer-python\nVersion: " + name[-3:])
        monkeypatch.syspath_prepend(tmp_path / name)
        for _ in range(2):
            Compilation(config, tmp_path).start(processes)
            Compilation(config, tmp_path).done()
    assert len(processes.started) == 12


def test_failures_are_told_and_the_start_goes_on(
    config: ExecutorConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    processes = Processes()
    processes.failure = "out of memory"
    Compilation(config, tmp_path).start(processes)
    assert "out of memory" in caplog.text


def test_every_kernel_file_is_compiled_again_when_it_changes(
    config: ExecutorConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "kernels"
    shutil.copytree(Path(kernels.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(kernels, "__file__", str(copy / "__init__.py"))

    def is_done() -> bool:
        processes = Processes()
        Compilation(config, tmp_path).start(processes)
        return not processes.started

    Compilation(config, tmp_path).done()
    for file in sorted(path for path in copy.rglob("*") if path.suffix in (".py", ".c")):
        launched = file.relative_to(copy).parts[0] not in ("bench", "vllm")
        text = file.read_bytes()
        file.write_bytes(text + b"\n")
        assert is_done() is not launched, file
        file.write_bytes(text)
        assert is_done()


def test_a_cache_that_cannot_be_written_is_told(
    config: ExecutorConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    Compilation(config, tmp_path / "file" / "cache").done()
    assert "the next start compiles again" in caplog.text


EXECUTOR = """
import os, sys
from pathlib import Path
from executor.gpu.compile_ahead import Compilation
from executor.config import ExecutorConfig
config = ExecutorConfig(model=sys.argv[1], store="s", compile_processes=2)
compilation = Compilation(config, Path(sys.argv[1]))
config_file = Path(sys.argv[1]) / "config.json"
config_file.unlink()
os.mkfifo(config_file)  # whoever reads it waits for ever
compilation.start()
"""


def test_processes_end_with_a_killed_executor(config: ExecutorConfig) -> None:
    with subprocess.Popen([sys.executable, "-c", EXECUTOR, config.model]) as executor:
        try:
            wait_until(lambda: len(nvcc_jobs(executor.pid)) == 5, "they are started")
            jobs = nvcc_jobs(executor.pid)
        finally:
            executor.kill()
        wait_until(lambda: not any(map(is_running, jobs)), "they end")
    assert all(1 <= count <= (os.cpu_count() or 1) for count in jobs.values())


def nvcc_jobs(parent: int) -> dict[int, int]:
    """Of its children, by pid. One that is only forked has its parent's environment, and is not here."""
    environments = {pid: environment(pid) for pid in children(parent)}
    return {pid: int(values["MAX_JOBS"]) for pid, values in environments.items() if "MAX_JOBS" in values}


def test_one_process_is_the_executor_itself(config: ExecutorConfig, tmp_path: Path) -> None:
    processes = Processes()
    Compilation(replace(config, compile_processes=1), tmp_path).start(processes)
    assert not processes.started


@pytest.mark.parametrize("family", ["qwen2-moe", "qwen3-moe", "gpt-oss"])
def test_a_part_is_compiled_with_one_layer_of_any_model(family: str, tmp_path: Path) -> None:
    """Such as transformers writes them: a list says what each of the layers is."""
    folder = make_moe_base(tmp_path, family)
    written = json.loads((folder / "config.json").read_text())
    if "mlp_only_layers" in written:
        written["mlp_only_layers"] = [0]
    (folder / "config.json").write_text(json.dumps(cut_to_one_layer(written)))
    config = read_config(folder)
    assert (config.num_layers, len(config.windows), config.moe and config.moe.layers) == (1, 1, (True,))
