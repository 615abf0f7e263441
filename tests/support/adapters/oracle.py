"""The truth: transformers + PEFT, one request at a time, eager, float32."""

import copy
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
    """One base model in memory; an adapter is put on a copy of it, so that no adapter sees another."""

    def __init__(self, model_folder: Path) -> None:
        self.base: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model_folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def with_adapter(self, folder: Path | None) -> PreTrainedModel | PeftModel:
        if folder is None:
            return self.base
        return PeftModel.from_pretrained(copy.deepcopy(self.base), folder, torch_dtype=torch.float32).eval()

    def greedy(self, adapter: Path | None, prompt: list[int], num_tokens: int) -> OracleRun:
        return greedy(self.with_adapter(adapter), prompt, num_tokens)


@torch.inference_mode()
def greedy(model: PreTrainedModel | PeftModel, prompt: list[int], num_tokens: int) -> OracleRun:
    """Goes on after end-of-sequence tokens, as `ignore_eos` does."""
    run = OracleRun([], [], [])
    past, inputs = None, torch.tensor([prompt])
    for _ in range(num_tokens):
        out = model(input_ids=inputs, past_key_values=past, use_cache=True)
        past, logits = out.past_key_values, out.logits[0, -1].float()
        best = torch.topk(logits, 2)
        token = int(best.indices[0])
        run.tokens.append(token)
        run.logprobs.append(float(torch.log_softmax(logits, -1)[token]))
        run.gaps.append(float(best.values[0] - best.values[1]))
        inputs = torch.tensor([[token]])
    return run
