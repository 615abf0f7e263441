"""How far vLLM's answers are from float64, on whatever LoRA kernels it is told to use.

    python -m kernels.bench.vllm_fidelity truth --model M --adapters A --prompts P --json truth.json
    VLLM_PLUGINS= python -m kernels.bench.vllm_fidelity run --model M --adapters A --truth T --json stock.json
    VLLM_PLUGINS=lorafleet python -m kernels.bench.vllm_fidelity run ... --json ours.json
    python -m kernels.bench.vllm_fidelity compare --truth truth.json --json RESULT stock.json ours.json

`truth` asks transformers and PEFT in float64 for the log-probability of each token of some text; `run` asks
vLLM for the same tokens (teacher-forced) and for greedy answers; `compare` sets the errors side by side.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Tokens of text that are scored, for each adapter and prompt; answers have a quarter of them.
LENGTH = 256
_RANK = 64


def truth(model: Path, adapters: Path, prompts: Path, length: int) -> dict[str, Any]:
    """{adapter: [{"token_ids": [..], "logprobs": [..]}]}: of all tokens but the first."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    asked: dict[str, list[str]] = json.loads(prompts.read_text())
    scored: dict[str, Any] = {}
    for name, questions in asked.items():
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
        if (adapters / name).is_dir():
            loaded = PeftModel.from_pretrained(loaded, str(adapters / name)).double()
        scored[name] = []
        for question in questions:
            chat = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            ids = (tokenizer(chat).input_ids * length)[:length]
            with torch.inference_mode():
                logits = loaded(torch.tensor([ids])).logits[0].log_softmax(-1)
            of_next = logits[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            scored[name].append({"token_ids": ids, "logprobs": of_next.tolist()})
    return scored


def run(model: Path, adapters: Path, scored: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The same as truth, with "greedy" answers and the gaps between their two likeliest tokens."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.platforms import current_platform

    engine = LLM(
        model=str(model), dtype=dtype, enable_lora=True, max_loras=len(scored), max_lora_rank=_RANK,
        max_model_len=2 * LENGTH, skip_tokenizer_init=True, enable_prefix_caching=False,
        gpu_memory_utilization=0.5,
    )  # fmt: skip
    texts = [(name, text) for name, of_one in scored.items() for text in of_one]
    requests = [
        LoRARequest(name, 1 + list(scored).index(name), str(adapters / name))
        if (adapters / name).is_dir()
        else None
        for name, _ in texts
    ]
    whole = [{"prompt_token_ids": text["token_ids"]} for _, text in texts]
    halves = [{"prompt_token_ids": text["token_ids"][: LENGTH // 8]} for _, text in texts]
    forced = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    greedy = SamplingParams(
        max_tokens=LENGTH // 4, temperature=0.0, logprobs=2, ignore_eos=True, detokenize=False
    )
    answers = engine.generate(whole, forced, lora_request=requests, use_tqdm=False)
    chosen = engine.generate(halves, greedy, lora_request=requests, use_tqdm=False)
    found: dict[str, Any] = {"wrapper": current_platform.get_punica_wrapper(), "dtype": dtype, "texts": []}
    for (name, text), answer, choice in zip(texts, answers, chosen, strict=True):
        ids = text["token_ids"]
        logprobs = [at[token].logprob for at, token in zip(answer.prompt_logprobs[1:], ids[1:], strict=True)]
        best = [
            sorted((each.logprob for each in at.values()), reverse=True) for at in choice.outputs[0].logprobs
        ]
        found["texts"].append(
            {
                "adapter": name,
                "logprobs": logprobs,
                "greedy": list(choice.outputs[0].token_ids),
                "gaps": [first - second for first, second, *_ in best],
            }
        )
    return found


def compare(scored: dict[str, Any], stock: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Root mean squares of the errors in nats, by adapter and in all, and where greedy answers part."""
    exact = [(name, text["logprobs"]) for name, of_one in scored.items() for text in of_one]
    rows = []
    for name in [*scored, "all"]:
        errors = [list(_errors(exact, each["texts"], name)) for each in (stock, ours)]
        stock_rms, ours_rms = (math.sqrt(math.fsum(e * e for e in some) / len(some)) for some in errors)
        rows.append(
            {"adapter": name, "stock_rms": stock_rms, "ours_rms": ours_rms, "ratio": ours_rms / stock_rms}
        )
    partings = [
        {
            "adapter": one["adapter"],
            "position": at,
            "gap_stock": one["gaps"][at],
            "gap_ours": other["gaps"][at],
        }
        for one, other in zip(stock["texts"], ours["texts"], strict=True)
        if (at := _first_difference(one["greedy"], other["greedy"])) is not None
    ]
    return {
        "dtype": ours["dtype"], "stock": stock["wrapper"], "ours": ours["wrapper"], "rows": rows,
        "answers": len(ours["texts"]), "partings": partings,
    }  # fmt: skip


def _errors(exact: list[tuple[str, list[float]]], texts: Sequence[Any], name: str) -> Iterator[float]:
    for (adapter, wanted), found in zip(exact, texts, strict=True):
        if name in (adapter, "all"):
            yield from (got - want for got, want in zip(found["logprobs"], wanted, strict=True))


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


def main() -> None:
    args = _parser().parse_args()
    if args.what == "truth":
        result = truth(args.model, args.adapters, args.prompts, LENGTH)
    elif args.what == "run":
        result = run(args.model, args.adapters, json.loads(args.truth.read_text()), args.dtype)
    else:
        stock, ours = (json.loads(path.read_text()) for path in args.results)
        result = compare(json.loads(args.truth.read_text()), stock, ours)
        command = " ".join(["python -m kernels.bench.vllm_fidelity", *sys.argv[1:]])
        result |= {"git": args.revision, "command": command}
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
    args.json.write_text(json.dumps(result, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench.vllm_fidelity", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", choices=["truth", "run", "compare"])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--adapters", type=Path, help="PEFT folders, called as the prompts' keys")
    parser.add_argument(
        "--prompts", type=Path, help="JSON: lists of questions by adapter, or by another word"
    )
    parser.add_argument("--truth", type=Path)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--json", type=Path, required=True, help="where the result goes")
    parser.add_argument("--revision", help="of this checkout (compare)")
    parser.add_argument("results", type=Path, nargs="*", help="of stock, then of ours (compare)")
    return parser


if __name__ == "__main__":
    main()
