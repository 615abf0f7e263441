"""One dispatch of each kind that needs its last token, or its count, for the next one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from executor.batch.sampling import SamplingParams
from executor.batch.sequence import Dispatch, StopRules
from tests.support.engines.driver import greedy

ENDS = frozenset({5, 17, 60, 90})  # so common that many sequences end by themselves


def dispatches(digests: Sequence[str]) -> list[Dispatch]:
    sampling: list[dict[str, Any]] = [
        {"temperature": 0},
        {"seed": 1},
        {"temperature": 0, "repetition_penalty": 1.4},
        {"seed": 2, "frequency_penalty": 0.7, "presence_penalty": 0.3},
        {"temperature": 0, "logit_bias": ((17, 1.0), (3, -4.0)), "logprobs": 2},
        {"seed": 3, "top_k": 20, "top_p": 0.9, "logprobs": 0},
    ]
    rules: list[dict[str, Any]] = [
        {"max_new_tokens": 9},
        {"max_new_tokens": 30, "stop_token_ids": ENDS},
        {"max_new_tokens": 30, "stop_token_ids": ENDS, "min_new_tokens": 6},
        {"max_new_tokens": 1},
    ]
    made = []
    for i in range(12):
        prompt = range(3 + 7 * i, 3 + 7 * i + (5, 20, 33)[i % 3])
        dispatch = greedy(
            f"{i}",
            prompt,
            digest=["", *digests[:4]][i % 5],
            sampling=SamplingParams(**sampling[i % 6]),
            stop=StopRules(ignore_eos=True, **rules[i % 4]),
        )
        made.append(replace(dispatch, prompt_logprobs=1) if i in (2, 7) else dispatch)
    return made
