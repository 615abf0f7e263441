from typing import Any

import pytest
import torch

from adapter_store.module_names import DENSE_PROJECTIONS
from executor.lora.config import LoRAConfig


def test_defaults_serve_the_dense_projections() -> None:
    assert LoRAConfig(max_loras=2, max_lora_rank=8).modules == frozenset(DENSE_PROJECTIONS)


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_loras", 0), ("max_lora_rank", 0), ("modules", frozenset()), ("dtype", torch.float64)],
)
def test_bad_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        LoRAConfig(**{"max_loras": 2, "max_lora_rank": 8, field: value})
