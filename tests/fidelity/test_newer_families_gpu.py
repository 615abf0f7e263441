"""Newer families on a GPU, their traits on: teacher-forced logits against transformers + PEFT.

Under a minute once FlashInfer's forms are compiled: with windows or without, with caps of scores or none.
"""

from pathlib import Path

import pytest
import torch

from tests.fidelity.families import NEWER
from tests.fidelity.forced import WIDE, Case, assert_equal, divergence

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("family", NEWER)
def test_float32_is_the_oracles(family: str, tmp_path: Path) -> None:
    kind, settings = NEWER[family]
    case = Case.tiny(kind, tmp_path, **settings)
    ours = case.ours(tmp_path / "store", device="cuda", dtype="float32")
    assert_equal(case, ours, case.logits(torch.float32))


@pytest.mark.parametrize("family", NEWER)
def test_bfloat16_is_as_near_to_the_oracle_as_peft_is(family: str, tmp_path: Path) -> None:
    kind, settings = NEWER[family]
    wide = {} if "rope_scaling" in settings and kind == "phi3" else WIDE  # it has a factor for each plane
    case = Case.tiny(kind, tmp_path, **{**settings, **wide})
    oracle = case.logits(torch.float32)
    theirs = divergence(oracle, case.logits(torch.bfloat16))
    ours = divergence(oracle, case.ours(tmp_path / "store", device="cuda", dtype="bfloat16"))
    assert ours <= 1.2 * theirs, (ours, theirs)
