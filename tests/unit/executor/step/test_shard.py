import pytest

from executor.config import ExecutorConfig
from executor.errors import StartError
from executor.step.shard import check_lora_dtype


def config(lora_dtype: str) -> ExecutorConfig:
    return ExecutorConfig(model="m", store="s", lora_dtype=lora_dtype)


def test_fp8_slots_that_a_card_cannot_convert_are_refused_at_the_start() -> None:
    with pytest.raises(StartError, match=r"--lora-dtype fp8 needs .* sm_80 .*use float8_e5m2"):
        check_lora_dtype(config("fp8"), (8, 0))


@pytest.mark.parametrize(
    ("lora_dtype", "capability"), [("fp8", (8, 9)), ("fp8", (9, 0)), ("fp8-e5m2", (8, 0)), ("auto", (8, 0))]
)
def test_others_are_served(lora_dtype: str, capability: tuple[int, int]) -> None:
    check_lora_dtype(config(lora_dtype), capability)
