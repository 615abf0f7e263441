"""The plugin in a vLLM that is installed, on a GPU. Skips where either is missing."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or importlib.util.find_spec("vllm") is None,
        reason="needs a CUDA device and vLLM",
    ),
]
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512,
    "vocab_size": 1024, "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "hidden_act": "silu",
    "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
launched = 0
def counted(function):
    def call(*arguments, **options):
        global launched
        launched += 1
        return function(*arguments, **options)
    return call
from kernels.vllm.dense import launches
launches.add_pair = counted(launches.add_pair)
engine = LLM(
    model=sys.argv[1], load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", enable_lora=True,
    max_loras=2, max_lora_rank=8, max_model_len=256, max_num_seqs=8, gpu_memory_utilization=0.2, seed=0,
)
asked = [{"prompt_token_ids": list(range(5, 25 + n))} for n in range(4)]
adapter = LoRARequest("one", 1, sys.argv[2])
how = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
answers = engine.generate(asked, how, lora_request=[adapter, None] * 2, use_tqdm=False)
print("RESULT", json.dumps([launched, [list(answer.outputs[0].token_ids) for answer in answers]]))
"""


def run(model: Path, adapter: Path, cache: Path, plugins: str) -> tuple[int, list[list[int]]]:
    """(launches of our kernels, answers)."""
    own = {
        "VLLM_PLUGINS": plugins, "VLLM_CACHE_ROOT": str(cache), "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = [sys.executable, "-c", ENGINE, str(model), str(adapter)]
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert found, done.stderr[-3000:]
    launched, answers = json.loads(found[0].removeprefix("RESULT "))
    return launched, answers


def test_stock_and_then_ours_on_one_cache(tmp_path: Path) -> None:
    """What vLLM compiled for its own kernels is not run in place of ours, nor the other way round."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.support.adapters.peft import make_adapter

    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    adapter = make_adapter(
        tmp_path / "adapter", LlamaForCausalLM(LlamaConfig(**MODEL)), seed=1, rank=8, std=0.05
    )
    stock = run(model, adapter, tmp_path / "cache", "")
    ours = run(model, adapter, tmp_path / "cache", "lorafleet")
    again = run(model, adapter, tmp_path / "cache", "")
    assert stock[0] == 0 and again[0] == 0
    assert ours[0] > 0
    assert stock[1] == again[1]
    # Without an adapter: with one, sums in another order may choose another of two equals.
    assert [stock[1][n] for n in (1, 3)] == [ours[1][n] for n in (1, 3)]
