"""Decoding and prefill by vLLM's offline engine, on whatever LoRA kernels it is told to use.

    lorafleet bench shapes llama-3.1-8b llama
    lorafleet bench make-adapters --count 64 --model llama --folder adapters
    VLLM_PLUGINS= python -m kernels.bench.vllm_engine --model llama --adapters adapters --json FILE
    VLLM_PLUGINS=lorafleet python -m kernels.bench.vllm_engine ... --best

    lorafleet bench shapes mixtral-8x7b mixtral --layers 16      # then adapters of it, and --max-loras 8

Dummy weights, greedy, random prompts, each answer to its full length. A row is the median repetition.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton

# Twice what any load takes. Being told, an engine does not look at what others take of the device, so that
# several can start together.
KV_CACHE_BYTES = 4 << 30
# What vLLM offers: graphs by the number of adapters, and no adapter on the head. VLLM_TUNED_CONFIG_FOLDER
# brings tuned block sizes, which our kernels do not read.
BEST: dict[str, Any] = {
    "specialize_active_lora": True,
    "lora_target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "compilation_config": {"cudagraph_capture_sizes": [1, 8, 64, 256]},
}


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    requests: int
    prompt: int
    output: int
    adapters: int
    repetitions: int

    @property
    def unit(self) -> str:
        return "input tok/s" if self.output == 1 else "output tok/s"

    @property
    def tokens(self) -> int:
        return self.requests * (self.prompt if self.output == 1 else self.output)


LOADS = (
    Load("D1", 64, 128, 128, 0, 9),
    Load("D1", 64, 128, 128, 8, 5),
    Load("D1", 64, 128, 128, 64, 3),
    Load("D3 x 8", 8, 128, 128, 8, 2),
    Load("D4, 8 x 256", 8, 256, 1, 0, 7),
    Load("D4, 8 x 256", 8, 256, 1, 8, 7),
    Load("D4, 8 x 2047", 8, 2047, 1, 0, 5),
    Load("D4, 8 x 2047", 8, 2047, 1, 8, 5),
)


@dataclass(frozen=True, slots=True)
class Row:
    workload: str
    adapters: int
    value: float
    unit: str
    seconds: tuple[float, ...]


class Engine:
    """vLLM with room for `max_loras` adapters of rank 16."""

    def __init__(self, model: Path, adapters: Path, max_loras: int, options: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        self._llm = LLM(
            model=str(model), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
            enable_lora=True, max_loras=max_loras, max_cpu_loras=max_loras, max_lora_rank=16,
            enable_prefix_caching=False, gpu_memory_utilization=0.2, kv_cache_memory_bytes=KV_CACHE_BYTES,
            max_model_len=2048, max_num_seqs=256, **options,
        )  # fmt: skip
        folders = sorted(folder for folder in adapters.iterdir() if folder.is_dir())[:max_loras]
        self._adapters = [LoRARequest(f.name, n, str(f)) for n, f in enumerate(folders, start=1)]
        self._draw = random.Random(0)

    def load_adapters(self) -> None:
        self._seconds(Load("", len(self._adapters), 8, 1, len(self._adapters), 1))

    def measure(self, load: Load) -> Row:
        """The first use of a form compiles what no warm-up has: it does not count."""
        self._seconds(load)
        seconds = tuple(round(self._seconds(load), 4) for _ in range(load.repetitions))
        return Row(load.name, load.adapters, round(load.tokens / median(seconds), 1), load.unit, seconds)

    def _seconds(self, load: Load) -> float:
        from vllm import SamplingParams

        how = SamplingParams(temperature=0.0, max_tokens=load.output, ignore_eos=True, detokenize=False)
        prompts = [
            {"prompt_token_ids": [self._draw.randrange(1000, 120_000) for _ in range(load.prompt)]}
            for _ in range(load.requests)
        ]
        asked = [self._adapters[n % load.adapters] if load.adapters else None for n in range(load.requests)]
        begin = time.perf_counter()
        answers: Sequence[Any] = self._llm.generate(prompts, how, lora_request=asked, use_tqdm=False)
        taken = time.perf_counter() - begin
        assert all(len(answer.outputs[0].token_ids) == load.output for answer in answers)
        return taken


def main() -> None:
    args = _parser().parse_args()
    import vllm
    from vllm.platforms import current_platform

    begin = time.perf_counter()
    engine = Engine(args.model, args.adapters, args.max_loras, BEST if args.best else {})
    about = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "vllm": vllm.__version__,
        "git": args.revision,
        "command": " ".join(["python -m kernels.bench.vllm_engine", *sys.argv[1:]]),
        "wrapper": current_platform.get_punica_wrapper(),
        "knobs": "best" if args.best else "as installed",
        "start_s": round(time.perf_counter() - begin, 1),
    }
    rows = list[Row]()
    served = [load for load in LOADS if load.adapters <= args.max_loras]
    for load in _asked() if args.wait else served:
        if not rows:
            engine.load_adapters()
        rows.append(row := engine.measure(load))
        args.json.write_text(json.dumps({**about, "rows": list(map(asdict, rows))}, indent=1) + "\n")
        sys.stdout.write(f"{row.workload:14} {row.adapters:3} {row.value:10,.0f} {row.unit}  {row.seconds}\n")
        sys.stdout.flush()


def _asked() -> Iterator[Load]:
    """Those of LOADS whose numbers come on standard input, one a line, each when "next" was written."""
    while True:
        sys.stdout.write("next\n")
        sys.stdout.flush()
        if not (number := sys.stdin.readline().strip()):
            return
        yield LOADS[int(number)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench.vllm_engine", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, required=True, help="a folder with a model's shapes")
    parser.add_argument("--adapters", type=Path, required=True, help="a folder of PEFT folders of rank 16")
    parser.add_argument("--max-loras", type=int, default=64, help="room for so many adapters (64)")
    parser.add_argument("--best", action="store_true", help="the knobs that vLLM offers, set for these loads")
    parser.add_argument("--wait", action="store_true", help="measure a load when its number comes on stdin")
    parser.add_argument("--json", type=Path, required=True, help="where results go")
    parser.add_argument("--revision", help="of this checkout")
    return parser


if __name__ == "__main__":
    main()
