"""The objects of a folder of deploy/, as kubectl renders them."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def render(overlay: str) -> list[dict[str, Any]]:
    if shutil.which("kubectl") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("kubectl is missing; .ci/run installs it")
        pytest.skip("kubectl is not installed")
    rendered = subprocess.run(
        ["kubectl", "kustomize", str(ROOT / "deploy" / overlay)], capture_output=True, text=True, check=True
    )
    return list(yaml.safe_load_all(rendered.stdout))


def one(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = (o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name)
    return found


def pod(workload: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    spec = workload["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return spec, container
