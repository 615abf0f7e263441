"""Who may import whom, beyond what import-linter sees: torch must not come through a third package."""

import pkgutil
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
forbidden = [name for name in sys.argv[2:] if name in sys.modules]
sys.exit(f"loaded: {forbidden}" if forbidden else 0)
"""


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("scheduler", ["torch", "transformers", "executor", "kernels"]),
        ("adapter_store", ["torch", "grpc", "transformers", "lorafleet"]),
        ("lorafleet", ["torch", "transformers", "peft", "scheduler", "executor", "kernels"]),
        ("executor", ["scheduler", "transformers"]),
        ("kernels", ["executor", "scheduler", "adapter_store", "lorafleet", "grpc"]),
    ],
)
def test_importing_everything_loads_nothing_forbidden(package: str, forbidden: list[str]) -> None:
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, package, *forbidden], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("module", ["executor.__main__", "executor.bench.paced"])
def test_what_needs_no_torch_does_not_wait_for_it(module: str) -> None:
    """Help and wrong flags, and an executor that computes nothing."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_client_install_brings_grpcio_and_protobuf_only() -> None:
    required = [r for r in metadata.requires("lorafleet") or [] if "extra ==" not in r]
    assert sorted(r.split(">")[0] for r in required) == ["grpcio", "protobuf"]


def test_kernels_looks_unfit_to_those_who_probe_for_the_hub_package_of_that_name() -> None:
    kernels = import_module("kernels")
    assert not hasattr(kernels, "__version__")
    assert metadata.version("lorafleet") < "0.10"


@pytest.mark.parametrize("package", ["lorafleet", "adapter_store"])
def test_all_is_exactly_what_is_public(package: str) -> None:
    module = import_module(package)
    submodules = {m.name for m in pkgutil.iter_modules(module.__path__)}
    public = {n for n in dir(module) if not n.startswith("_")} - submodules
    assert sorted(module.__all__) == sorted(public)
