"""The adapters' answers in transformers and PEFT, in float32: what a server's answers must equal."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UNSEEN_QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "How can I make a cup of tea?",
    "What does a cat eat?",
    "What should I do on a rainy day?",
    "Tell me about the moon.",
    "What is the capital of Italy?",
    "Why do leaves fall in autumn?",
    "What does a photographer do?",
    "How can I learn to swim?",
    "Tell me about the ocean.",
    "Give me a tip to write a story.",
    "What is a robot?",
    "Can you explain photosynthesis to me?",
)
PROMPTS_EACH = 3
STEPS = 32
MIN_GAP = 1e-2  # between the two best logits: other orders of float32 sums move them by about 1e-5

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GreedyRun:
    text: str
    num_tokens: int  # with the end-of-turn token
    min_gap: float  # the smallest distance of the two best logits over all tokens


def load_tokenizer(model_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


def load_base(model_path: Path, dtype: str = "float32") -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype))


def load_adapter(model_path: Path, folder: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(load_base(model_path), str(folder)).eval()


def greedy(model: Any, tokenizer: Any, question: str, max_tokens: int) -> GreedyRun:
    """Answer one user message greedily, until the end of the turn or `max_tokens` tokens."""
    import torch

    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    with torch.inference_mode():
        out = model.generate(
            **prompt,
            max_new_tokens=max_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    token_ids = out.sequences[0, prompt["input_ids"].shape[1] :]
    best = torch.stack(out.logits)[:, 0].topk(2).values  # [tokens, 2]
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    return GreedyRun(text, len(token_ids), float((best[:, 0] - best[:, 1]).min()))


def compare(model_path: Path, folder: Path, max_tokens: int = 48) -> list[tuple[str, str, str]]:
    """(question, answer of the base, answer with the adapter) for the first five unseen questions."""
    tokenizer, base, adapted = (
        load_tokenizer(model_path),
        load_base(model_path),
        load_adapter(model_path, folder),
    )
    rows = []
    for question in UNSEEN_QUESTIONS[:5]:
        answers = [greedy(model, tokenizer, question, max_tokens).text for model in (base, adapted)]
        rows.append((question, answers[0], answers[1]))
        log.info("%s\n  base: %s\n  %s: %s", question, answers[0], folder.name, answers[1])
    return rows


def choose_prompts(model_path: Path, adapters: Path, target: Path) -> None:
    """Write `target`: for "base" and each adapter, user messages whose STEPS greedy tokens leave no doubt.

    A message is taken when its answer has STEPS tokens and the two best logits of each stay MIN_GAP apart, so
    that every correct float32 implementation must produce the same tokens.
    """
    tokenizer = load_tokenizer(model_path)
    chosen: dict[str, list[str]] = {}
    for name in ["base", *sorted(path.parent.name for path in adapters.glob("*/adapter_config.json"))]:
        model = load_base(model_path) if name == "base" else load_adapter(model_path, adapters / name)
        chosen[name] = []
        for question in UNSEEN_QUESTIONS:
            run = greedy(model, tokenizer, question, STEPS)
            log.info("%s: %s: %d tokens, smallest gap %.4f", name, question, run.num_tokens, run.min_gap)
            if run.num_tokens == STEPS and run.min_gap > MIN_GAP:
                chosen[name].append(question)
            if len(chosen[name]) == PROMPTS_EACH:
                break
    target.write_text(json.dumps(chosen, indent=2) + "\n", encoding="utf-8")
