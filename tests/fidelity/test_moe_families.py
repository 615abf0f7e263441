"""Tiny random models with experts, by the engine: adapters of experts, of attention and of both in one batch,
in two slots, preempted and resumed."""

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from adapter_store import DiskStore, ModelSpec
from tests.fidelity.conftest import NUM_TOKENS, Expected
from tests.fidelity.moe_families import KINDS, make_moe_family
from tests.support.compilations import compilations
from tests.support.engines import greedy, make_driver
from tests.support.moe_models import ATTENTION

# What runs it, for the float32 that is compared. On a GPU decoding is captured, attention sinks included.
ON = [
    pytest.param({}, id="cpu"),
    pytest.param(
        {"device": "cuda", "dtype": "float32", "compile_processes": 1},
        id="cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("family", KINDS)
def test_family_with_experts_equals_peft(
    family: str, device: Mapping[str, Any], expect: Callable[..., Expected], tmp_path: Path
) -> None:
    model, streams = make_moe_family(family, tmp_path)
    expected = expect(model, streams)
    store, spec = DiskStore(tmp_path / "store"), ModelSpec.from_folder(model)
    digests = {
        stream.name: store.put(stream.adapter, "default", stream.name, spec).digest if stream.adapter else ""
        for stream in streams
    }
    driver = make_driver(
        str(model),
        store,
        lora_modules=(*ATTENTION, *KINDS[family]),
        torch_threads=1,
        block_size=4,
        num_kv_blocks=26,
        **device,
    )
    with closing(driver.engine):
        with compilations() as compiled:
            answers = driver.run(
                *(
                    greedy(s.name, s.prompt, digest=digests[s.name], max_new_tokens=NUM_TOKENS, logprobs=0)
                    for s in streams
                )
            )
        assert not compiled, "once it is ready"
        assert driver.metric("preemptions_total") > 0
    for stream, tokens in zip(streams, answers, strict=True):
        assert tokens == expected[stream.name].tokens, stream.name
        got = [token.token.logprob for token in driver.tokens[0, stream.name]]
        assert got == pytest.approx(expected[stream.name].logprobs, abs=1e-4), stream.name
