"""Adapters on their way to the slots of several real ranks: everywhere or nowhere, whoever fails."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adapter_store import DiskStore, ModelSpec
from executor.adapters.slot_writer import WriterInTurn
from executor.build_shard import build_shard
from executor.config import ExecutorConfig
from executor.lora.config import LoRAConfig
from executor.lora.errors import RankTooLarge
from executor.lora.image import SlotImage, build_slot_image
from executor.lora.layout import SlotLayout
from executor.ranks.leader import Ranks, start_ranks
from executor.ranks.messages import CopyIntoSlot, Failed, ForgetImage
from executor.ranks.shared_tokens import SharedTokensPass
from executor.ranks.spread_adapters import SpreadAdapters
from executor.rejection import RejectedByRank
from executor.step.inputs import SequenceRows
from tests.support.adapters.peft import make_adapter, rewrite
from tests.support.engines.driver import SMALL
from tests.support.services.cluster import wait_until


@dataclass
class Spread:
    """Ranks with adapters and steps, without an engine. `run(slot)`: the logits of one token."""

    ranks: Ranks
    adapters: SpreadAdapters
    layout: SlotLayout
    forward: SharedTokensPass

    def run(self, slot: int) -> Tensor:
        step = (SequenceRows([7], 0, [0], slot, [0]),)
        with self.ranks.step(step):
            return self.forward.run(step, torch.zeros(SMALL["max_seats"], dtype=torch.int64)).clone()

    def others_have(self, ticket: int) -> list[bool]:
        """Rank by rank: whether it can copy that image. Slot 1 is void then."""
        self.ranks.tell(CopyIntoSlot(1, ticket))
        return [not isinstance(answer, Failed) for answer in self.ranks.answers()]


@contextmanager
def spread(
    model: Path,
    store: DiskStore,
    folder: Path,
    size: int = 2,
    refuse: Callable[[str], bool] = lambda digest: False,
    **settings: Any,
) -> Iterator[Spread]:
    """`refuse`: the adapters that rank 0, and no other, cannot load."""
    given = {"store": str(folder), "tensor_parallel_size": size, "torch_threads": 1} | settings
    config = ExecutorConfig(model=str(model), **(SMALL | given))
    lost: list[Exception] = []
    ranks, group = start_ranks(config, lost.append)
    try:
        shard = build_shard(config, group)
        nbytes = shard.arena.nbytes_per_slot + ranks.wait_ready(0.0)

        def load(digest: str) -> SlotImage:
            if refuse(digest):
                raise RankTooLarge("layers.0.q_proj", 99, 16)
            with store.open(digest) as weights:
                return build_slot_image(weights, shard.arena.layout)

        writer = WriterInTurn(shard.arena, shard.punica)
        adapters = SpreadAdapters(ranks, writer, nbytes, 64 << 20, load, 30.0)
        yield Spread(ranks, adapters, shard.arena.layout, SharedTokensPass(shard.forward_pass, group))
    finally:
        ranks.close()
    assert not lost


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
def test_a_copy_that_fails_on_one_rank_leaves_the_slot_empty_on_all(
    tiny_base: Path, tiny_store: DiskStore, store_folder: Path, digests: list[str], sharded: bool
) -> None:
    """Whichever rank it is; else one would answer by the new adapter and the other by the slot's last one."""
    with spread(tiny_base, tiny_store, store_folder, fully_sharded_loras=sharded) as on_ranks:
        adapters, base = on_ranks.adapters, on_ranks.run(-1)
        old, new = adapters.load_image(digests[3]), adapters.load_image(digests[4])
        adapters.load(0, old)
        by_old = on_ranks.run(0)
        assert not torch.equal(by_old, base)
        on_ranks.ranks.tell(ForgetImage(new.ticket))
        with pytest.raises(RejectedByRank):
            adapters.load(0, new)
        assert torch.equal(on_ranks.run(0), base)
        adapters.load(0, old)
        assert torch.equal(on_ranks.run(0), by_old)
        foreign = build_slot_image({}, SlotLayout.on_rank(on_ranks.layout.slices, LoRAConfig(1, 3)))
        with pytest.raises(ValueError, match="another slot layout"):
            adapters.load(0, replace(old, own=foreign))
        assert torch.equal(on_ranks.run(0), base)
        adapters.load(0, adapters.load_image(digests[4]))
        assert not torch.equal(on_ranks.run(0), base)


def test_what_rank_0_cannot_load_the_other_forgets(
    tiny_base: Path, tiny_store: DiskStore, store_folder: Path, digests: list[str]
) -> None:
    """And what it said of it is not taken for its answer to the next load on that lane, the only one."""
    refused = {digests[3]}
    one_lane = {"loader_threads": 1}
    with spread(tiny_base, tiny_store, store_folder, refuse=refused.__contains__, **one_lane) as on_ranks:
        adapters = on_ranks.adapters
        first = adapters.load_image(digests[0])
        assert first.ticket == 0
        with pytest.raises(RankTooLarge):
            adapters.load_image(digests[3])
        assert adapters.load_image(digests[0]).nbytes == first.nbytes
        assert on_ranks.others_have(0) == [True]
        wait_until(lambda: on_ranks.others_have(1) == [False], "the other rank forgets it")
        refused.clear()
        image = adapters.load_image(digests[3])
        assert on_ranks.others_have(image.ticket) == [True]
        adapters.forget(image)
        assert on_ranks.others_have(image.ticket) == [False]


def test_what_one_other_rank_cannot_load_all_forget(tiny_base: Path, tmp_path: Path) -> None:
    """Of four ranks the last one has the inputs whose weights are too large for its dtype."""
    folder = make_adapter(tmp_path / "adapter", tiny_base, seed=1, targets=("o_proj",))

    def overflow(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, tensor in tensors.items():
            tensor[:, -1] *= 1e6 if "lora_A" in name else 1
        return tensors

    rewrite(folder, overflow)
    store = DiskStore(tmp_path / "store")
    digest = store.put(folder, "default", "large", ModelSpec.from_folder(tiny_base)).digest
    with spread(tiny_base, store, tmp_path / "store", size=4, dtype="float16") as on_ranks:
        with pytest.raises(RejectedByRank, match=r"o_proj.lora_a .* not finite as float16") as refused:
            on_ranks.adapters.load_image(digest)
        assert refused.value.rejection.reason == "INCOMPATIBLE_ADAPTER"
        wait_until(lambda: on_ranks.others_have(0) == [False] * 3, "all forget it")
