"""The plugin in a package with vLLM's names: it enters, or stays out and says why in a line."""

import importlib
import logging
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kernels.vllm.plugin import STOCK, identity, register
from kernels.vllm.reference_check import WRAPPERS, lacks
from tests.kernels.vllm.fake_vllm import write_vllm

ROOT = Path(__file__).parents[3]
WRAPPER = "kernels.vllm.punica_gpu.PunicaWrapperGPU"
BASE, GPU, META, LAYER = (
    "lora/punica_wrapper/punica_base.py",
    "lora/punica_wrapper/punica_gpu.py",
    "lora/ops/triton_ops/lora_kernel_metadata.py",
    "lora/layers/base_linear.py",
)


@pytest.fixture(autouse=True)
def no_vllm_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def platform() -> Any:
    return importlib.import_module("vllm.platforms").current_platform


def config() -> Any:
    return importlib.import_module("vllm.config.lora").LoRAConfig


def registered(caplog: pytest.LogCaptureFixture, level: int) -> str:
    """Call the plugin, which must say one line, at this level: what it says."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="vllm"):
        register()
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("vllm.lorafleet", level)
    return record.getMessage()


def test_it_names_our_wrapper_and_enters_the_key_of_the_compile_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_vllm(tmp_path)
    keys = [config()(rank).compute_hash() for rank in (8, 16)]
    assert WRAPPER in registered(caplog, logging.INFO)
    assert platform().get_punica_wrapper() == type(platform()).get_punica_wrapper() == WRAPPER
    ours = [config()(rank).compute_hash() for rank in (8, 16)]
    assert len({*keys, *ours}) == 4
    module, _, name = WRAPPER.rpartition(".")
    assert isinstance(getattr(importlib.import_module(module), name), type)
    # vLLM may load it again in the same process.
    registered(caplog, logging.INFO)
    assert platform().get_punica_wrapper() == WRAPPER
    assert [config()(rank).compute_hash() for rank in (8, 16)] == ours


def test_a_later_version_gets_the_wrapper_that_has_its_buffers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_vllm(tmp_path, {BASE: ("2, max_num_batched_tokens", "max_num_batched_tokens")})
    assert f"{WRAPPER}33" in registered(caplog, logging.INFO)
    registered(caplog, logging.INFO)
    assert platform().get_punica_wrapper() == f"{WRAPPER}33"


def test_the_key_has_our_name_and_follows_our_source(monkeypatch: pytest.MonkeyPatch) -> None:
    assert identity().startswith("lorafleet ")
    before = identity()
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda file: read(file) + b"#")
    assert identity() != before


def stays_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> str:
    before = config()().compute_hash(), platform().get_punica_wrapper()
    line = registered(caplog, logging.WARNING)
    assert (config()().compute_hash(), platform().get_punica_wrapper()) == before
    return line


@pytest.mark.parametrize(
    ("file", "old", "new", "missing"),
    [
        (GPU, "add_expand", "add_everything", "PunicaWrapperGPU.add_everything"),
        (GPU, "add_inputs=True", "add_inputs=True, rows=None", "PunicaWrapperGPU.add_expand(rows)"),
        (GPU, "lora_b_stacked, output_slices", "output_slices, lora_b_stacked", "add_expand(output_slices)"),
        (GPU, "output_slices", "output_slices=()", "add_expand(output_slices left out)"),
        (GPU, ", output_slices,", ",", "add_expand(output_slices left out)"),
        (GPU, "**kwargs): ...\n", "*, layer=None, **kwargs): ...\n", "__init__(layer)"),
        (GPU, "class PunicaWrapperGPU", "class Renamed", f"{GPU} with a class PunicaWrapperGPU"),
        (META, "token_lora_mapping", "row_mapping", "LoRAKernelMeta.row_mapping"),
        (META, "captured_lora_counts", "counts", "LoRAKernelMeta.make(counts)"),
        (BASE, "2, max", "4, max", "_embeddings_indices of shape [4, max_num_batched_tokens]"),
        (BASE, "(max_num_batched_tokens,", "(max_num_batched_tokens + 1,", "_sampler_indices of shape"),
        (BASE, "self._sampler_indices =", "self._rows =", "PunicaWrapperBase._rows of shape"),
        (LAYER, "_embeddings_indices", "_other_indices", "punica_wrapper._other_indices"),
        (LAYER, "add_input=", "gather=", "punica_wrapper.add_expand(gather)"),
        (LAYER, "add_expand(", "apply_all(", "punica_wrapper.apply_all"),
    ],
)
def test_a_version_that_needs_more_keeps_its_own_and_is_told_what(
    file: str, old: str, new: str, missing: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_vllm(tmp_path, {file: (old, new)})
    line = stays_out(tmp_path, caplog)
    assert missing in line
    assert "vLLM 9.9" in line


def test_what_cannot_be_read_is_no_reason_to_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_vllm(tmp_path, {GPU: ("class", "clas")})
    assert "SyntaxError" in stays_out(tmp_path, caplog)


def test_a_configuration_without_a_key_keeps_stock(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_vllm(tmp_path, {"config/lora.py": ("def compute_hash", "compute_hash = None\n    def other")})
    assert "compute_hash" in registered(caplog, logging.WARNING)
    assert platform().get_punica_wrapper() == STOCK


def test_who_wants_the_same_bits_in_every_batch_keeps_stock(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_vllm(tmp_path, {"envs.py": ("False", "True")})
    assert "VLLM_BATCH_INVARIANT" in stays_out(tmp_path, caplog)


def test_a_platform_with_a_wrapper_of_its_own_keeps_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_vllm(tmp_path)
    monkeypatch.setenv("FAKE_WRAPPER", "another.Wrapper")
    assert "another.Wrapper" in stays_out(tmp_path, caplog)


def test_other_platforms_are_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_vllm(tmp_path)
    monkeypatch.setenv("FAKE_PLATFORM", "cpu")
    assert "not CUDA" in registered(caplog, logging.INFO)
    assert platform().get_punica_wrapper() == STOCK
    assert config()().compute_hash() == "stock 16"


def test_a_new_process_finds_it_by_its_entry_point(tmp_path: Path) -> None:
    """What pip writes from pyproject.toml, loaded as vLLM loads its plugins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["vllm.general_plugins"]
    assert all(each.startswith("triton") for each in project["optional-dependencies"]["vllm"])
    write_vllm(tmp_path)
    info = tmp_path / "lorafleet-0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lorafleet\nVersion: 0.0\n")
    lines = ["[vllm.general_plugins]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlib.metadata import entry_points\n"
            "(point,) = entry_points(group='vllm.general_plugins', name='lorafleet')\n"
            "point.load()()\n"
            "from vllm.platforms import current_platform\n"
            "print(current_platform.get_punica_wrapper())",
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == WRAPPER, run.stderr


def test_the_real_source_lacks_nothing() -> None:
    source = os.environ.get("LORAFLEET_VLLM_SOURCE")
    if source is None:
        pytest.skip("LORAFLEET_VLLM_SOURCE names no folder with vLLM's source")
    assert any(lacks(Path(source) / "vllm", wrapper) == [] for wrapper in WRAPPERS)
