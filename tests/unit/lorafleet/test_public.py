import subprocess
import sys

import lorafleet


def test_all_is_what_can_be_imported() -> None:
    """Public names are those of __all__, apart from submodules that importing leaves on the package."""
    public = {
        name
        for name, value in vars(lorafleet).items()
        if not name.startswith("_") and type(value).__name__ != "module"
    }
    assert public == set(lorafleet.__all__)
    assert lorafleet.__all__ == sorted(lorafleet.__all__)


def test_importing_the_client_and_the_command_loads_no_service_package() -> None:
    heavy = "torch transformers rich numpy safetensors prometheus_client grpc_status google.rpc"
    script = (
        "import sys, lorafleet, lorafleet.cli, lorafleet.local, lorafleet.demo.run, lorafleet.demo.live\n"
        f"print(*(n for n in '{heavy} scheduler executor kernels'.split() if n in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("", "", 0)
