"""What is told of a real cache folder, whoever changes it."""

from pathlib import Path
from queue import SimpleQueue

from adapter_store import CachedStore, DiskStore, ModelSpec
from executor.adapters.disk_tier import DiskTier
from executor.adapters.residency import Copy, Tier
from tests.support.adapters.peft import lora_pair, make_base, raw_adapter

PATIENCE_S = 60.0


def test_loads_and_discards_are_told_and_nothing_is_told_twice(tmp_path: Path) -> None:
    spec = ModelSpec.from_folder(make_base(tmp_path / "model"))
    store = DiskStore(tmp_path / "store")
    pushed = raw_adapter(tmp_path / "a", lora_pair("model.layers.0.self_attn.q_proj", 64, 64, rank=4), r=4)
    version = store.put(pushed, "acme", "a", spec)
    copy = Copy(version.digest, Tier.DISK, version.manifest.num_bytes)
    cache, other = (CachedStore(store, tmp_path / "cache", 1 << 30) for _ in range(2))
    cache.open(version.digest).close()
    told: SimpleQueue[tuple[Copy, ...]] = SimpleQueue()
    tier = DiskTier(cache, told.put)
    tier.start()
    assert told.get(timeout=PATIENCE_S) == (copy,)
    tier.discard(version.digest)
    assert told.get(timeout=PATIENCE_S) == ()
    other.open(version.digest).close()  # another executor of this machine
    assert told.get(timeout=PATIENCE_S) == (copy,)
    tier.discard("sha256:" + "0" * 64)  # what is not there
    tier.discard(version.digest)
    assert told.get(timeout=PATIENCE_S) == ()
    tier.close()
    assert told.empty()
