"""Runs vLLM's own tests of its LoRA operations and layers, with ours in place of theirs.

    python -m kernels.vllm.reference_tests SOURCE [TEST ...] [--options PYTEST'S OPTIONS]

SOURCE is a checkout of vLLM at the tag of the vLLM that is installed: the folder that has `tests/`. Without
a TEST, those of operations, experts and layers run. Needs a GPU and pytest. How often each of ours was called
is told at the end: a test that reaches none of them says nothing about them.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

TESTS = (
    "test_punica_ops.py", "test_punica_ops_fp8.py", "test_fused_moe_lora_kernel.py",
    "test_fused_moe_lora_fp8_kernel.py", "test_moe_lora_align_sum.py", "test_layers.py",
)  # fmt: skip
# Where vLLM has a name -> the module of ours that has it, too.
OPERATIONS = {
    ("vllm.lora.ops.triton_ops", "lora_shrink"): "kernels.vllm.lora_shrink",
    ("vllm.lora.ops.triton_ops", "lora_expand"): "kernels.vllm.lora_expand",
    ("vllm.lora.ops.triton_ops", "lora_shrink_fp8"): "kernels.vllm.lora_shrink_fp8",
    ("vllm.lora.ops.triton_ops", "lora_expand_fp8"): "kernels.vllm.lora_expand_fp8",
    ("vllm.lora.ops.triton_ops", "fused_moe_lora"): "kernels.vllm.fused_moe_lora",
    ("vllm.lora.ops.triton_ops", "fused_moe_lora_fp8"): "kernels.vllm.fused_moe_lora_fp8",
    ("vllm._custom_ops", "moe_lora_align_block_size"): "kernels.vllm.moe_lora_align",
}
CLASSES = {
    ("vllm.lora.ops.triton_ops", "LoRAKernelMeta"): "kernels.vllm.kernel_meta",
    ("vllm.lora.punica_wrapper.punica_gpu", "PunicaWrapperGPU"): "kernels.vllm.punica_gpu",
}


class InPlace:
    """A pytest plugin: puts our operations where tests import theirs from, and counts calls."""

    def __init__(self) -> None:
        self.calls = Counter[str]()

    def pytest_configure(self, config: Any) -> None:
        from kernels.vllm.plugin import register

        for (module, name), ours in OPERATIONS.items():
            setattr(import_module(module), name, self._counted(name, getattr(import_module(ours), name)))
        for (module, name), ours in CLASSES.items():
            setattr(import_module(module), name, getattr(import_module(ours), name))
        register()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("calls of lorafleet's operations by tests")
        for _, name in OPERATIONS:
            terminalreporter.write_line(f"{name:28} {self.calls[name]:8,}")

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls[name] += 1
            return function(*arguments, **options)

        return call


def main() -> int:
    import pytest

    args = _parser().parse_args()
    folder = args.source / "tests" / "lora"
    if not folder.is_dir():
        sys.exit(f"{args.source} has no tests/lora: name a checkout of vLLM, at the tag that is installed")
    chosen = args.tests or [name for name in TESTS if (folder / name).is_file()]
    missing = [name for name in chosen if not (folder / name).is_file()]
    if missing:
        sys.exit(f"{folder} has no {', '.join(missing)}")
    paths = [str(folder / name) for name in chosen]
    return int(pytest.main(["--rootdir", str(args.source), *paths, *args.options], plugins=[InPlace()]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kernels.vllm.reference_tests", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("source", type=Path, metavar="SOURCE", help="vLLM's checkout")
    parser.add_argument("tests", nargs="*", metavar="TEST", help="files in tests/lora")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="the rest is for pytest")
    return parser


if __name__ == "__main__":
    sys.exit(main())
