"""Layers for which other kernels are compiled than for the ones before."""

from pathlib import Path

import pytest
import torch

from executor.gpu.layer_kinds import layer_kinds
from executor.lora.config import LoRAConfig
from executor.lora.replace import attach_lora
from executor.models import load_model
from kernels.punica import PunicaWrapperCPU
from tests.support.adapters.moe_models import make_moe_base
from tests.support.adapters.peft import DENSE
from tests.support.adapters.tiny_models import make_model


def kinds(folder: Path, max_loras: int = 4, modules: tuple[str, ...] = DENSE) -> tuple[int, ...]:
    model = load_model(folder, torch.float32, "cpu")
    config = LoRAConfig(max_loras, 8, frozenset(modules))
    attach_lora(model, config, PunicaWrapperCPU(max_loras, 16))
    return layer_kinds(model)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    make_model("llama", num_hidden_layers=6).save_pretrained(tmp_path)
    return tmp_path


def test_layers_are_alike(llama: Path) -> None:
    assert kinds(llama) == (0,)


@pytest.mark.parametrize(
    ("max_loras", "first"), [(1, (0, 1, 2, 3)), (2, (0, 1)), (3, (0, 1, 2, 3)), (8, (0,))]
)
def test_tables_of_ranks_may_begin_elsewhere(llama: Path, max_loras: int, first: tuple[int, ...]) -> None:
    """Seven modules a layer, of `max_loras` ranks of 4 bytes each."""
    assert kinds(llama, max_loras) == first


def test_windows_differ(tmp_path: Path) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    make_model("qwen2", num_hidden_layers=5, **windows).save_pretrained(tmp_path)
    assert kinds(tmp_path) == (0, 2)


def test_some_layers_have_experts(tmp_path: Path) -> None:
    make_moe_base(tmp_path, "qwen2-moe", num_hidden_layers=4, decoder_sparse_step=2)
    assert kinds(tmp_path, modules=("q_proj", "experts")) == (0, 1)
