"""Names, order and defaults of our expert operations are those of the vLLM whose source is at hand."""

import ast
import inspect
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.vllm import fused_moe_lora, fused_moe_lora_fp8, moe_lora_align

SOURCE = os.environ.get("LORAFLEET_VLLM_SOURCE")
OPS = "lora/ops/triton_ops"
OURS: dict[str, tuple[str, Callable[..., None]]] = {
    "moe_lora_align_block_size": ("_custom_ops.py", moe_lora_align._moe_lora_align_block_size),
    "_fused_moe_lora": (f"{OPS}/fused_moe_lora_op.py", fused_moe_lora._fused_moe_lora),
    "_fused_moe_lora_shrink": (f"{OPS}/fused_moe_lora_op.py", fused_moe_lora._fused_moe_lora_shrink),
    "_fused_moe_lora_expand": (f"{OPS}/fused_moe_lora_op.py", fused_moe_lora._fused_moe_lora_expand),
    "_fused_moe_lora_fp8": (f"{OPS}/fused_moe_lora_fp8_op.py", fused_moe_lora_fp8._fused_moe_lora_fp8),
    "_fused_moe_lora_shrink_fp8": (
        f"{OPS}/fused_moe_lora_fp8_op.py",
        fused_moe_lora_fp8._fused_moe_lora_shrink_fp8,
    ),
    "_fused_moe_lora_expand_fp8": (
        f"{OPS}/fused_moe_lora_fp8_op.py",
        fused_moe_lora_fp8._fused_moe_lora_expand_fp8,
    ),
}


def theirs(file: Path, name: str) -> list[tuple[str, object]]:
    """(parameter, default) of a function; a parameter without one has `inspect.Parameter.empty`."""
    tree = ast.parse(file.read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    arguments = found.args.args
    defaults = [ast.literal_eval(default) for default in found.args.defaults]
    missing = [inspect.Parameter.empty] * (len(arguments) - len(defaults))
    return list(zip([argument.arg for argument in arguments], [*missing, *defaults], strict=True))


@pytest.mark.skipif(SOURCE is None, reason="LORAFLEET_VLLM_SOURCE names no folder that has vllm's source")
@pytest.mark.parametrize("name", OURS)
def test_the_signature_is_vllms(name: str) -> None:
    file, function = OURS[name]
    ours = [(each.name, each.default) for each in inspect.signature(function).parameters.values()]
    known = theirs(Path(str(SOURCE)) / "vllm" / file, name)
    assert ours[: len(known)] == known
    # What newer ones take besides stands behind, and need not be given.
    assert all(default is not inspect.Parameter.empty for _, default in ours[len(known) :])
