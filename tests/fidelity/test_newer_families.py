"""Families with traits of their own, on an engine of one rank and of two: what transformers + PEFT answer."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.fidelity.by_engine import assert_engine_equals
from tests.fidelity.conftest import Expected, Stream
from tests.fidelity.families import make_family
from tests.support.adapters.peft import DENSE, TABLES

Made = Callable[[str], tuple[Path, list[Stream]]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return cache(lambda family: make_family(family, tmp_path_factory.mktemp(family)))


@pytest.mark.parametrize(
    ("family", "size", "sharded"),
    [
        ("smollm3", 1, False),
        ("smollm3", 2, True),
        ("granite", 1, False),
        ("olmo2", 1, False),
        ("olmo2", 2, True),
        ("olmo3", 1, False),
        ("phi4-mini", 1, False),
        ("phi3", 2, False),
        ("phi3", 2, True),
        ("glm4", 1, False),
        ("glm4", 2, True),
        ("starcoder2", 1, False),
        ("starcoder2", 2, True),
        ("cohere", 1, False),
        ("cohere2", 1, False),
        ("cohere2", 2, False),
        ("gemma2", 1, False),
        ("gemma2", 2, True),
        ("gemma3", 1, False),
        ("gemma3", 2, False),
    ],
)
def test_newer_family_equals_peft(
    family: str, size: int, sharded: bool, made: Made, expect: Callable[..., Expected], tmp_path: Path
) -> None:
    """Twelve streams in two slots and too few blocks; two ranks do not serve DoRA."""
    model, every = made(family)
    streams = [stream for stream in every if size == 1 or not stream.name.startswith("dora")]
    driver = assert_engine_equals(
        expect,
        model,
        streams,
        tmp_path / "store",
        tensor_parallel_size=size,
        fully_sharded_loras=sharded,
        lora_modules=(*DENSE, *TABLES),
        max_loras=2,
        max_lora_rank=64,
        block_size=4,
        num_kv_blocks=40,
    )
    assert driver.metric("preemptions_total") > 0
    assert driver.metric("page_ins_total") >= len(streams) - 1
