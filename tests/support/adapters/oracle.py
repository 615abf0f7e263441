"""The truth: transformers + PEFT, one request at a time, eager, float32."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel


@dataclass(frozen=True)
class OracleRun:
    tokens: list[int]  # greedy
    logprobs: list[float]  # of those tokens
    gaps: list[float]  # between the best and the second-best logit, at each step


class Oracle:
    """One base model in memory; adapters are put on copies of its modules, and see none of each other."""

    def __init__(self, model_folder: Path) -> None:
        self.base: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model_folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def with_adapter(self, folder: Path | None) -> PreTrainedModel | PeftModel:
        if folder is None:
            return self.base
        shared = {id(weight): weight for weight in self.base.parameters()}  # which PEFT leaves as they are
        modules = copy.deepcopy(self.base, shared)
        return PeftModel.from_pretrained(modules, folder, torch_dtype=torch.float32).eval()

    def greedy(
        self, adapter: Path | None, prompt: list[int], num_tokens: int, guess: Sequence[int] = ()
    ) -> OracleRun:
        return greedy(self.with_adapter(adapter), prompt, num_tokens, guess)


@torch.inference_mode()
def greedy(
    model: PreTrainedModel | PeftModel, prompt: list[int], num_tokens: int, guess: Sequence[int] = ()
) -> OracleRun:
    """Goes on after end-of-sequence tokens, as `ignore_eos` does.

    A right `guess` of the answer saves time: one pass, in place of one for each token, shows that each of its
    tokens is the best after those before it. A wrong one changes nothing of what is returned.
    """
    if len(guess) == num_tokens:
        together = model(input_ids=torch.tensor([[*prompt, *guess[:-1]]])).logits[0, len(prompt) - 1 :]
        run = _chosen(together)
        if run.tokens == list(guess):
            return run
    run = OracleRun([], [], [])
    past, inputs = None, torch.tensor([prompt])
    for _ in range(num_tokens):
        out = model(input_ids=inputs, past_key_values=past, use_cache=True)
        past, found = out.past_key_values, _chosen(out.logits[0, -1:])
        run.tokens.extend(found.tokens)
        run.logprobs.extend(found.logprobs)
        run.gaps.extend(found.gaps)
        inputs = torch.tensor([found.tokens])
    return run


def _chosen(logits: torch.Tensor) -> OracleRun:
    """What is best in each row."""
    logits = logits.float()
    values, best = torch.topk(logits, 2)
    logprobs = torch.log_softmax(logits, -1).gather(1, best[:, :1])[:, 0]
    return OracleRun(best[:, 0].tolist(), logprobs.tolist(), (values[:, 0] - values[:, 1]).tolist())
