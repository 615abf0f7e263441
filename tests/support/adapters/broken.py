"""Files of adapters to break before they are pushed, and what a refusal must look like."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors.torch import load, save

from lorafleet.v1 import common_pb2, inference_pb2
from tests.support.services.failures import Failure, Stubs, failure, push_parts

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Files = dict[str, bytes]
Tensors = dict[str, torch.Tensor]


def ours(found: Failure, code: str, reason: str) -> None:
    assert (found.code, found.reason, found.domain) == (code, reason, "lorafleet"), found
    assert "Traceback" not in found.message and "/tmp" not in found.message
    assert (found.retry_s is not None) == (code == "UNAVAILABLE")


def ask_for(adapter: str) -> Any:
    return inference_pb2.GenerateRequest(
        text="The quick", adapter=adapter, stopping=common_pb2.Stopping(max_new_tokens=2)
    )


def push_failure(stubs: Stubs, files: Mapping[str, bytes], name: str = "broken", **header: Any) -> Failure:
    return failure(stubs.adapters.Push, push_parts(name, files, **header), "ops")


def tensors(change: Callable[[Tensors], object], files: Files) -> Files:
    weights = load(files[WEIGHTS])
    change(weights)
    return {**files, WEIGHTS: save(weights)}


def config(files: Files, **fields: Any) -> Files:
    return {**files, CONFIG: json.dumps(json.loads(files[CONFIG]) | fields).encode()}
