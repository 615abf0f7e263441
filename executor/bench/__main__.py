"""`python -m executor.bench --json FILE [PART ...]`: times of the engine's parts on a GPU."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import triton

from executor.bench import host_step, marked_steps, page_in, sampling, traffic

PARTS = {
    "page_in": page_in.run, "sampling": sampling.run, "host_step": host_step.run, "traffic": traffic.run,
    "marked_steps": marked_steps.run,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m executor.bench", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--json", type=Path, required=True, help="where results go")
    parser.add_argument("--revision", help="what is measured, where the folder is no git checkout")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for part in args.parts or PARTS:
        for row in PARTS[part]():
            rows.append(row)
            args.json.write_text(json.dumps({**_about(args.revision), "rows": rows}, indent=1) + "\n")
            shown = (f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values())
            sys.stdout.write(" ".join(shown) + "\n")


def _about(revision: str | None) -> dict[str, str]:
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "git": revision or head.stdout.strip(),
        "command": " ".join(["python -m executor.bench", *sys.argv[1:]]),
    }


if __name__ == "__main__":
    main()
