"""Every layer with LoRA stands for a layer of a served family, but for one and its twin."""

import json
from pathlib import Path

import torch

from adapter_store.base.families import FAMILIES
from executor.config import MODULE_KINDS
from executor.distributed import ParallelGroup
from executor.lora import layers as lora
from executor.lora.config import LoRAConfig
from executor.lora.layers import BaseLayerWithLoRA
from executor.lora.replace import LAYERS_WITH_LORA, plan_layers
from executor.models import CausalLM, construction, read_config

# Three or more parts of any widths under one module: gated delta nets have such, and no family has those.
UNUSED = {
    lora.MergedColumnParallelLinearVariableSliceWithLoRA,
    lora.MergedColumnParallelLinearVariableSliceWithShardedLoRA,
}
SIZES = {"num_hidden_layers": 1, "vocab_size": 64, "max_window_layers": 0, "decoder_sparse_step": 1}


def chosen(folder: Path, architecture: str, size: int, sharded: bool) -> set[type[BaseLayerWithLoRA]]:
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **SIZES}))
    with construction(torch.bfloat16, "meta"):
        model = CausalLM(read_config(folder), ParallelGroup(0, size))
    config = LoRAConfig(2, 8, frozenset(MODULE_KINDS), torch.bfloat16, sharded)
    return {type(layer) for layer in plan_layers(model, config).values()}


def test_every_other_class_is_chosen_by_a_family(tmp_path: Path) -> None:
    forms = [(1, False), (2, False), (2, True)]
    none: set[type[BaseLayerWithLoRA]] = set()
    by_form = [none.union(*(chosen(tmp_path, family, *form) for family in FAMILIES)) for form in forms]
    plain = {each for each in LAYERS_WITH_LORA if each.fully_sharded is not True} - UNUSED
    assert by_form[0] == by_form[1] == plain
    assert by_form[2] == {each for each in LAYERS_WITH_LORA if each.fully_sharded is not False} - UNUSED


def test_fused_projections_take_one_module_each(tmp_path: Path) -> None:
    shared = {
        lora.RowParallelLinearWithLoRA,
        lora.LogitsProcessorWithLoRA,
        lora.VocabParallelEmbeddingWithLoRA,
    }
    fused = {lora.QKVParallelLinearWithLoRA, lora.ColumnParallelLinearWithLoRA}
    assert chosen(tmp_path, "Phi3ForCausalLM", 2, False) == shared | fused
