"""Models with experts on two ranks answer as transformers + PEFT do: experts cut, or shared out."""

from collections.abc import Callable
from pathlib import Path

import pytest

from adapter_store import DiskStore
from executor.errors import UnsupportedModel
from tests.fidelity.by_engine import assert_engine_equals
from tests.fidelity.conftest import Expected
from tests.fidelity.moe_families import KINDS, make_moe_family
from tests.support.adapters.moe_models import ATTENTION
from tests.support.adapters.peft import make_base
from tests.support.engines.driver import make_driver

NAMES = ("experts", "both-rslora", "down")


@pytest.mark.parametrize(
    ("family", "more", "settings"),
    [
        ("mixtral", "all-linear", {}),
        ("qwen2-moe", "shared", {"fully_sharded_loras": True}),
        ("qwen3-moe", "all-linear", {"expert_parallel": True}),
        ("gpt-oss", "router", {"expert_parallel": True}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_two_ranks_equal_peft(
    family: str, more: str, settings: dict[str, bool], expect: Callable[..., Expected], tmp_path: Path
) -> None:
    model, streams = make_moe_family(family, tmp_path, (*NAMES, more))
    assert_engine_equals(
        expect,
        model,
        streams,
        tmp_path / "store",
        tensor_parallel_size=2,
        lora_modules=(*ATTENTION, *KINDS[family]),
        **settings,
    )


def test_experts_that_are_not_there_are_not_shared_out(tmp_path: Path) -> None:
    model = make_base(tmp_path / "model")
    with pytest.raises(UnsupportedModel, match="--expert-parallel: this model has no experts"):
        make_driver(str(model), DiskStore(tmp_path / "store"), expert_parallel=True)
