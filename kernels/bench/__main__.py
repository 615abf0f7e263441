"""`python -m kernels.bench OP --json FILE`: times of one operation on a GPU, or a plot of such a file.

The plot is `python -m kernels.bench plot --json FILE --png FILE`.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kernels.bench import (
    fused_moe_lora,
    host_cost,
    lora_fp8,
    lora_layer,
    lora_linear,
    mixed_ranks,
    moe_gemm,
    moe_tune,
    nucleus,
    paged_decode,
    scale_outputs,
    tune,
    vllm_experts,
    vllm_linear,
)
from kernels.bench.moe_inputs import SHAPES, TOKENS, selected
from kernels.bench.plot import plot
from kernels.bench.table import table

OPS = (
    "lora_linear", "lora_layer", "mixed_ranks", "host_cost", "tune", "fused_moe_lora", "moe_tune", "lora_fp8",
    "moe_gemm", "nucleus", "paged_decode", "scale_outputs", "vllm_linear", "vllm_experts",
)  # fmt: skip


def main() -> None:
    args = _parser().parse_args()
    if args.op == "plot":
        plot(json.loads(args.json.read_text()), args.png)
        return
    about, rows = _about(args.revision), list[dict[str, Any]]()
    for row in _run(args):
        rows.append(row)
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    sys.stdout.write(table(rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__)
    parser.add_argument("op", choices=[*OPS, "plot"])
    parser.add_argument("--json", type=Path, required=True, help="where results go, or (plot) come from")
    parser.add_argument("--png", type=Path, help="where the plot goes")
    parser.add_argument("--revision", help="what is measured, where the folder is no git checkout")
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="Triton's cache is warm (lora_linear, lora_layer, experts, lora_fp8, vllm_linear)",
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 8, 32, 64])
    parser.add_argument("--peer", type=Path, help="folder of an unpacked vLLM wheel with its dependencies")
    parser.add_argument("--other", type=Path, help="a Python file with another nucleus() (nucleus)")
    parser.add_argument(
        "--candidates", action="store_true", help="other block sizes too (lora_fp8, moe_gemm)"
    )
    parser.add_argument("--shapes", nargs="+", choices=[s.name for s in SHAPES], help="of expert layers")
    parser.add_argument("--tokens", type=int, nargs="+", choices=TOKENS, help="of expert layers")
    parser.add_argument("--flashinfer", action="store_true", help="measure FlashInfer's experts (moe_gemm)")
    parser.add_argument("--peer-tuned", type=Path, help="folder of its tuned kernel configurations (rank 16)")
    return parser


def _run(args: argparse.Namespace) -> Iterable[dict[str, Any]]:
    if args.op == "mixed_ranks":
        return mixed_ranks.run()
    if args.op == "lora_layer":
        return lora_layer.run(compiled=args.compiled)
    if args.op == "host_cost":
        return host_cost.run()
    if args.op == "nucleus":
        return nucleus.run(args.other)
    if args.op == "paged_decode":
        return paged_decode.run()
    if args.op == "scale_outputs":
        return scale_outputs.run()
    if args.op == "tune":
        return tune.run(tuple(args.ranks))
    if args.op == "vllm_linear":
        return vllm_linear.run(tuple(args.ranks), args.peer, args.peer_tuned, compiled=args.compiled)
    if args.op == "lora_fp8":
        return lora_fp8.run(args.peer, tune=args.candidates, compiled=args.compiled)
    points = selected(args.shapes, args.tokens)
    if args.op == "fused_moe_lora":
        return fused_moe_lora.run(points, args.peer, compiled=args.compiled)
    if args.op == "moe_tune":
        return moe_tune.run(points, compiled=args.compiled)
    if args.op == "vllm_experts":
        return vllm_experts.run(points, compiled=args.compiled)
    if args.op == "moe_gemm":
        return moe_gemm.run(
            points, args.peer, tune=args.candidates, flashinfer=args.flashinfer, compiled=args.compiled
        )
    options = lora_linear.Options(tuple(args.ranks), lora_linear.POINTS, args.peer, args.peer_tuned)
    return lora_linear.run(options, compiled=args.compiled)


def _about(revision: str | None) -> dict[str, str]:
    import torch
    import triton

    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "git": revision or head.stdout.strip(),
        "command": " ".join(["python -m kernels.bench", *sys.argv[1:]]),
    }


if __name__ == "__main__":
    main()
