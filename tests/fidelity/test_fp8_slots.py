"""What FP8 slots cost: the real adapters of the demo, on a real model, against slots of float32."""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import lorafleet.demo
from adapter_store import DiskStore, ModelSpec
from adapter_store.module_names import DENSE_PROJECTIONS
from executor.layers.attention import KVCache
from executor.lora.config import LoRAConfig
from executor.lora.image import build_slot_image
from executor.lora.replace import attach_lora
from executor.models import load_model
from executor.step.inputs import SequenceRows, build_step
from kernels.punica import PunicaWrapperCPU
from lorafleet.demo.model import default_cache, prepare_model
from tests.support.adapters.moe_models import EXPERTS, make_moe_adapter, make_moe_base
from tests.support.adapters.peft import make_adapter, make_base
from tests.support.engines.driver import greedy, make_driver

DEMO = Path(lorafleet.demo.__file__).parent
NAMES = ("emoji", "json", "pirate", "shout")
# Mean over positions, in nats; measured 5e-5 at most for e4m3 and 4e-4 for e5m2.
LARGEST_KL = {torch.float8_e4m3fn: 1e-4, torch.float8_e5m2: 1e-3}
LARGEST_ERROR = {torch.float8_e4m3fn: 0.03, torch.float8_e5m2: 0.06}


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return prepare_model(default_cache(), lambda stage, share: None)


@contextmanager
def slots(
    model_folder: Path, store: DiskStore, digests: list[str], dtype: torch.dtype
) -> Iterator[tuple[Callable[[int, list[int]], torch.Tensor], list[float]]]:
    """Yields (what runs a sequence in each adapter's slot, the errors of the adapters)."""
    model = load_model(model_folder, torch.float32, "cpu")
    punica = PunicaWrapperCPU(len(digests), 256)
    arena = attach_lora(
        model, LoRAConfig(len(digests), 16, frozenset(DENSE_PROJECTIONS), dtype), punica
    ).arena
    errors = []
    for slot, digest in enumerate(digests):
        with store.open(digest) as weights:
            image = build_slot_image(weights, arena.layout)
        arena.load(slot, image)
        errors.append(image.error)
    cache = KVCache.allocate(8, 16, model.config, torch.float32, "cpu")

    def log_probabilities(slot: int, tokens: list[int]) -> torch.Tensor:
        rows = SequenceRows(tokens, 0, range(8), slot, range(len(tokens)))
        token_ids, context = build_step([rows], cache, punica)
        return torch.log_softmax(model.compute_logits(model(token_ids, context), context), -1)

    yield log_probabilities, errors


@torch.inference_mode()
def test_the_divergence_from_float32_slots_is_small(smollm2: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompts = json.loads((DEMO / "prompts.json").read_text())
    store, spec = DiskStore(tmp_path / "store"), ModelSpec.from_folder(smollm2)
    digests = [store.put(DEMO / "adapters" / name, "default", name, spec).digest for name in NAMES]
    texts = [tokenizer(" ".join(prompts[name])).input_ids[:100] for name in NAMES]
    with slots(smollm2, store, digests, torch.float32) as (exact, errors):
        assert errors == [0.0] * len(NAMES)
        truth = [exact(slot, tokens) for slot, tokens in enumerate(texts)]
    for dtype, largest in LARGEST_KL.items():
        with slots(smollm2, store, digests, dtype) as (rounded, errors):
            assert all(0 < error < LARGEST_ERROR[dtype] for error in errors)
            for slot, tokens in enumerate(texts):
                found = rounded(slot, tokens)
                divergence = (truth[slot].exp() * (truth[slot] - found)).sum(-1)
                assert 0 < divergence.mean() < largest, NAMES[slot]


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_an_engine_logs_every_adapters_error(
    experts: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if experts:
        model = make_moe_base(tmp_path / "model", "qwen3-moe")
        adapter = make_moe_adapter(tmp_path / "a", model, seed=1, parameters=EXPERTS)
    else:
        model = make_base(tmp_path / "model")
        adapter = make_adapter(tmp_path / "a", model, seed=1)
    store, spec = DiskStore(tmp_path / "store"), ModelSpec.from_folder(model)
    digest = store.put(adapter, "default", "a", spec).digest
    caplog.set_level(logging.INFO)
    logged = {}
    for dtype in ("auto", "fp8"):
        modules = ("experts",) if experts else tuple(DENSE_PROJECTIONS)
        driver = make_driver(str(model), store, lora_dtype=dtype, lora_modules=modules)
        with closing(driver.engine):
            driver.run(greedy("one", (5, 6, 7), digest=digest, max_new_tokens=2))
        logged[dtype] = [record for record in caplog.records if "relative error" in record.message]
    assert logged["auto"] == []
    (record,) = logged["fp8"]
    assert record.digest == digest  # type: ignore[attr-defined]
    assert 0.01 < float(record.message.rpartition(" ")[2]) < 0.03
