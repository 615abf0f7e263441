"""What a manifest keeps of its modules."""

import gc
from dataclasses import replace

import pytest

from adapter_store import DataLoss
from adapter_store.manifest import Manifest, ModuleInfo

MODULES = tuple(
    ModuleInfo(f"layers.{layer}.{name}", 4, 2.0, 16, 16)
    for layer in range(20)
    for name in ("q_proj", "v_proj")
)
MANIFEST = Manifest("sha256:a", MODULES, ("F32",), 1000, None)


def test_manifests_of_equal_modules_share_them() -> None:
    """A scheduler keeps a thousand manifests: objects of its own in each stopped it for long."""
    told = [replace(MANIFEST, digest=f"sha256:{number}").to_json() for number in range(200)]
    first = Manifest.from_json(told[0])
    gc.collect()
    before = len(gc.get_objects())
    manifests = [Manifest.from_json(text) for text in told]
    gc.collect()
    assert len(gc.get_objects()) - before < 10 * len(manifests)
    assert [each.modules for each in manifests] == [MODULES] * 200
    assert all(one is other for one, other in zip(manifests[-1].modules, first.modules, strict=True))


def test_what_is_read_is_what_was_written_to_the_type() -> None:
    for rank, scale in ((4, 2.0), (4, 4.0), (2, 2.0)):
        modules = (ModuleInfo("lm_head", rank, scale, 16, 32, dora=rank == 2),)
        (read,) = Manifest.from_json(replace(MANIFEST, modules=modules).to_json()).modules
        assert (read, type(read.rank), type(read.scale), type(read.dora)) == (modules[0], int, float, bool)


def test_a_module_that_is_none_is_a_loss() -> None:
    text = replace(MANIFEST, modules=MODULES[:1]).to_json()
    for damage in (text.replace('"rank": 4', '"rank": [4]'), text.replace('"rank": 4', '"tier": 4')):
        with pytest.raises(DataLoss, match="a stored manifest is damaged"):
            Manifest.from_json(damage)
