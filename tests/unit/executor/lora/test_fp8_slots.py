"""Slots in FP8: what is stored, how far off it is, and that layers answer from exactly that."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from executor.lora.arena import SlotArena
from executor.lora.config import LoRAConfig
from executor.lora.errors import NonFiniteWeights
from executor.lora.image import build_slot_image
from executor.lora.layout import SlotLayout
from executor.lora.quantize import FP8_DTYPES, quantize, quantize_into
from executor.lora.replace import class_for
from kernels.metadata.meta import LoRAMapping
from kernels.punica import PunicaWrapperCPU
from tests.unit.executor.lora.adapters import make_adapter, poison
from tests.unit.executor.lora.layer_cases import CASES, EVERY_KIND, MODEL_CONFIG, make_rig

NUMPY: dict[torch.dtype, Any] = {
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
}
# Half a unit in the last place of 3 and of 2 bits of mantissa; a factor's error stays below that of its worst
# element, and is a third of it for smooth distributions.
BOUND = {torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3}
DRAWS = {
    "normal": lambda rng, shape: rng.standard_normal(shape) * 0.02,
    "uniform": lambda rng, shape: rng.uniform(-0.01, 0.01, shape),
    "outliers": lambda rng, shape: rng.standard_normal(shape) * np.where(rng.random(shape) < 0.01, 50, 0.1),
    "tiny": lambda rng, shape: rng.standard_normal(shape) * 1e-12,
    "zeros": lambda rng, shape: np.zeros(shape),
}


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("draw", DRAWS)
def test_the_error_is_bounded_and_reported(draw: str, dtype: torch.dtype) -> None:
    source = DRAWS[draw](np.random.default_rng(3), (16, 257)).astype(np.float32)
    target = np.empty(source.shape, NUMPY[dtype])
    found = quantize_into([target], [source])
    missed = target.astype(np.float32) * np.float32(found.scale) - source
    norm = np.linalg.norm(source)
    assert found.error == pytest.approx(np.linalg.norm(missed) / norm if norm else 0.0, rel=1e-4)
    assert found.error <= BOUND[dtype] * (0.45 if draw in ("normal", "uniform") else 1)
    # Element by element: relative where FP8 is normal, absolute below.
    floor = found.scale * float(ml_dtypes.finfo(NUMPY[dtype]).smallest_normal)
    assert (np.abs(missed) <= np.maximum(np.abs(source), floor) * BOUND[dtype] * (1 + 1e-5)).all()
    values, scale = quantize(torch.from_numpy(source), dtype)
    assert scale == found.scale
    assert np.array_equal(values.view(torch.uint8).numpy(), target.view(np.uint8))


def test_pieces_of_one_factor_share_a_scale() -> None:
    source = np.random.default_rng(1).standard_normal((4, 30)).astype(np.float32)
    whole, parts = (
        np.empty(source.shape, ml_dtypes.float8_e4m3fn),
        np.empty(source.shape, ml_dtypes.float8_e4m3fn),
    )
    first = quantize_into([whole], [source])
    second = quantize_into([parts[:, :7], parts[:, 7:]], [source[:, :7], source[:, 7:]])
    assert np.array_equal(whole.view(np.uint8), parts.view(np.uint8))
    assert first.scale == second.scale


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_an_image_equals_set_lora_and_what_it_stores(name: str, dtype: torch.dtype) -> None:
    rig, case = make_rig(name, 2, 8), CASES[name]
    config = LoRAConfig(2, 8, EVERY_KIND, dtype)
    base = rig.layer.base_layer
    layer = class_for(base, config, case.names, MODEL_CONFIG)(base, case.names)
    slices = [part.slot_slice for part in layer.served_parts(config, MODEL_CONFIG)]
    arena = SlotArena(SlotLayout.on_rank(slices, config), 2, "cpu")
    layer.create_lora_weights(2, config, MODEL_CONFIG, arena=arena)
    layer.set_mapping(punica := PunicaWrapperCPU(2, 64))
    rig.layer, rig.punica = layer, punica
    adapter = make_adapter(arena.layout, dict.fromkeys(case.names, 5), seed=1)
    poison(arena, 0)
    image = build_slot_image(adapter, arena.layout)
    assert 0 < image.error <= BOUND[dtype]
    arena.load(0, image)
    modules = [adapter[module] for module in case.names]
    factors = [(torch.tensor(m.lora_a), torch.tensor(m.lora_b).T, m.scale) for m in modules]
    layer.set_lora(1, *([f[i] for f in factors] for i in (0, 1)), [f[2] for f in factors])
    x, runs = rig.inputs(7), ((0, 4), (-1, 3))
    punica.update_metadata(LoRAMapping(runs, runs))
    loaded = rig.call(x)
    rig.adapters[0] = [
        (*(values.float() * scale for values, scale in (quantize(a, dtype), quantize(b, dtype))), s)
        for a, b, s in factors
    ]
    expected = rig.expected(list(runs), x)
    torch.testing.assert_close(loaded.double(), expected, rtol=2e-5, atol=2e-5)
    runs = ((1, 4), (-1, 3))
    punica.update_metadata(LoRAMapping(runs, runs))
    torch.testing.assert_close(rig.call(x), loaded, rtol=1e-6, atol=1e-6)


def test_slots_take_half_of_what_bfloat16_takes() -> None:
    slices = tuple(part.slot_slice for part in make_rig("qkv", 1, 8).layer.served)
    wide = replace(SlotLayout(slices, 64, torch.bfloat16))
    narrow = replace(wide, dtype=torch.float8_e4m3fn)
    assert narrow.slot_elements == wide.slot_elements
    assert SlotArena(narrow, 3, "cpu").storage.nbytes * 2 == SlotArena(wide, 3, "cpu").storage.nbytes


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("half", ["lora_a", "lora_b"])
def test_what_is_not_finite_is_refused_by_name(half: str, value: float) -> None:
    slices = tuple(part.slot_slice for part in make_rig("qkv", 1, 8).layer.served)
    layout = SlotLayout(slices, 8, torch.float8_e4m3fn)
    adapter = make_adapter(layout, {"layers.0.v_proj": 2}, seed=1)
    array = getattr(adapter["layers.0.v_proj"], half).copy()
    array[1, 3] = value
    broken = {"layers.0.v_proj": replace(adapter["layers.0.v_proj"], **{half: array})}
    with pytest.raises(NonFiniteWeights, match=rf"layers\.0\.v_proj\.{half}"):
        build_slot_image(broken, layout)


def test_scales_that_overflow_together_are_refused_by_name() -> None:
    """A module's own scale and those of its factors: each is finite."""
    slices = tuple(part.slot_slice for part in make_rig("qkv", 1, 8).layer.served)
    layout = SlotLayout(slices, 8, torch.float8_e4m3fn)
    module = make_adapter(layout, {"layers.0.v_proj": 2}, seed=1)["layers.0.v_proj"]
    loud = replace(module, scale=1e30, lora_a=module.lora_a * 1e20)
    with pytest.raises(NonFiniteWeights, match=r"layers\.0\.v_proj\.scale"):
        build_slot_image({"layers.0.v_proj": loud}, layout)


@pytest.mark.parametrize("dtype", FP8_DTYPES)
def test_values_too_small_for_a_scale_are_zeros(dtype: torch.dtype) -> None:
    values, scale = quantize(torch.full((2, 3), 1e-44), dtype)
    assert scale > 0 and (values.float() * scale == 0).all()


def test_sharded_adapters_are_refused() -> None:
    with pytest.raises(ValueError, match="fully_sharded_loras must be false with FP8"):
        LoRAConfig(1, 8, dtype=torch.float8_e4m3fn, fully_sharded_loras=True)
