"""Logits that a family caps or scales equal those of transformers with PEFT, on the same hidden states."""

from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, PreTrainedConfig

from executor.layers import LogitsProcessor, ParallelLMHead
from executor.lora.config import LoRAConfig
from executor.lora.layers import LogitsProcessorWithLoRA
from kernels.metadata.meta import LoRAMapping
from kernels.punica import PunicaWrapperCPU
from tests.unit.executor.lora.layer_cases import HIDDEN, MODEL_CONFIG, VOCAB

RANK = 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 10, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


class Family(NamedTuple):
    config: PreTrainedConfig
    processor: LogitsProcessor


FAMILIES = {
    "Gemma 2 caps": Family(
        Gemma2Config(final_logit_softcapping=5.0, **SIZES), LogitsProcessor(VOCAB, soft_cap=5.0)
    ),
    "Granite divides": Family(
        GraniteConfig(logits_scaling=6.0, **SIZES), LogitsProcessor(VOCAB, scale=1 / 6.0)
    ),
    "Cohere multiplies": Family(CohereConfig(logit_scale=0.3, **SIZES), LogitsProcessor(VOCAB, scale=0.3)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_pefts(family: str) -> None:
    torch.manual_seed(0)
    config, processor = FAMILIES[family]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tokens = torch.arange(3, 8)[None]
    tuned = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=8, target_modules=["lm_head"]))
    for name, weight in tuned.named_parameters():
        if "lm_head" in name:
            torch.nn.init.normal_(weight)
    head = ParallelLMHead(VOCAB, HIDDEN)
    projection = tuned.base_model.model.lm_head
    head.weight.copy_(projection.base_layer.weight)
    layer = LogitsProcessorWithLoRA(processor, ["lm_head"])
    layer.create_lora_weights(1, LoRAConfig(1, RANK, frozenset({"lm_head"})), MODEL_CONFIG)
    layer.set_mapping(punica := PunicaWrapperCPU(1, 8))
    adapter = (half["default"].weight for half in (projection.lora_A, projection.lora_B))
    layer.set_lora(0, *adapter, projection.scaling["default"])
    assert (layer.scale, layer.soft_cap) == (processor.scale, processor.soft_cap)
    with torch.inference_mode():
        hidden, wanted = model.model(tokens).last_hidden_state[0], tuned(tokens).logits[0]
        with tuned.disable_adapter():
            plain = tuned(tokens).logits[0]
        punica.update_metadata(LoRAMapping(((0, 3), (-1, 2)), ((0, 3), (-1, 2))))
        got = layer(head, hidden)
    assert (wanted - plain).abs().max() > 0.1, "the adapter is not loud"
    torch.testing.assert_close(got, torch.cat([wanted[:3], plain[3:]]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("soft_cap", [0.0, -1.0, float("nan")])
def test_a_cap_that_caps_nothing_is_refused(soft_cap: float) -> None:
    with pytest.raises(ValueError, match="soft_cap"):
        LogitsProcessor(VOCAB, soft_cap=soft_cap)
