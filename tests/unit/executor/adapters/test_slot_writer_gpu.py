"""Slots are written beside the steps that run, and no step sees a slot that is half written."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch

from executor.adapters.host_pool import HostPool, Region
from executor.adapters.slot_writer import SideStreamWriter
from executor.lora.arena import SlotArena
from executor.lora.image import Buffer, SlotImage, build_slot_image
from executor.lora.layout import SlotLayout, SlotSlice
from kernels.punica_gpu import PunicaWrapperGPU
from tests.unit.executor.lora.adapters import make_adapter
from tests.unit.executor.step.test_sampler_gpu import no_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
KINDS = {"q_proj": (512, 512), "down_proj": (1500, 70)}
SLICES = tuple(SlotSlice(f"layers.{i}.{kind}", *sizes) for i in range(24) for kind, sizes in KINDS.items())
LAYOUT = SlotLayout(SLICES, 16, torch.bfloat16)
LONG = 200_000_000  # cycles that a step sleeps: about a tenth of a second


@dataclass
class World:
    arena: SlotArena
    writer: SideStreamWriter
    pool: HostPool

    def image(self, seed: int, rank: int) -> SlotImage:
        ranks = {part.module: rank for part in SLICES[seed:]}
        adapter = make_adapter(LAYOUT, ranks, seed=seed)
        regions: list[Region] = []

        def allocate(nbytes: int) -> Buffer:
            thread = threading.Thread(target=lambda: regions.append(self.pool.claim(str(seed), nbytes)))
            thread.start()
            while thread.is_alive():
                self.pool.serve((str(seed),), lambda: False)
            return regions[0].array

        return build_slot_image(adapter, LAYOUT, allocate)

    def step(self, *slots: int, sleep: int = 0) -> list[Mapping[str, torch.Tensor]]:
        """What a step reads of its slots, some time after its launch."""
        self.writer.before_step(slots)
        torch.cuda._sleep(sleep)
        read = [
            {
                "stripe": self.arena.storage[slot].clone(),
                "ranks": self.arena.ranks[:, slot].clone(),
                "scales": self.arena.scales[:, slot].clone(),
            }
            for slot in slots
        ]
        self.writer.after_step(slots)
        return read

    def expected(self, image: SlotImage, read: Mapping[str, torch.Tensor]) -> None:
        """The slot holds this image: by the reference, on the CPU, over what else was there."""
        truth = SlotArena(LAYOUT, 1, "cpu")
        truth.storage[0] = read["stripe"].cpu()
        truth.load(0, image)
        assert torch.equal(truth.storage[0].view(torch.int16), read["stripe"].cpu().view(torch.int16))
        assert read["ranks"].tolist() == list(image.ranks)
        assert read["scales"].tolist() == list(image.scales)


@pytest.fixture
def world() -> World:
    arena = SlotArena(LAYOUT, 3, "cuda")
    arena.storage.fill_(torch.nan)
    writer = SideStreamWriter(arena, PunicaWrapperGPU(3, 64, "cuda"))
    return World(
        arena, writer, HostPool(256 << 20, LAYOUT.max_block_bytes, lambda: None, torch.device("cuda"))
    )


def test_images_are_pinned_and_enter_whole(world: World) -> None:
    images = [world.image(0, 16), world.image(3, 5), world.image(40, 1)]
    assert all(image.block.is_pinned() for image in images)
    for slot, image in enumerate(images):
        world.writer.load(slot, image)
    for image, read in zip(images, world.step(0, 1, 2), strict=True):
        world.expected(image, read)
    took = world.writer.load_seconds()
    assert len(took) == 3 and all(0 < seconds < 1 for seconds in took)
    assert world.writer.load_seconds() == []
    world.writer.clear(1)
    [read] = world.step(1)
    assert not read["ranks"].any() and not read["scales"].any()


def test_a_slot_is_written_after_the_step_that_reads_it_and_before_the_next(world: World) -> None:
    """Neither the host nor a step of other slots waits for the copy."""
    old, new, other = world.image(0, 16), world.image(1, 9), world.image(2, 7)
    world.writer.load(0, old)
    world.step(0)
    with no_waiting():
        [before] = world.step(0, sleep=LONG)
        running = torch.cuda.current_stream().record_event()
        copied = world.writer.load(1, other)
        world.writer.load(0, new)
        after, beside = world.step(0, 1)
    copied.synchronize()
    assert not running.query(), "a copy into another slot waits for a step that does not read it"
    world.expected(old, before)
    world.expected(new, after)
    world.expected(other, beside)


def test_a_step_waits_on_the_device_for_a_slow_copy(world: World) -> None:
    image = world.image(0, 16)
    with no_waiting():
        with torch.cuda.stream(world.writer.stream):
            torch.cuda._sleep(LONG)
        world.writer.load(2, image)
        [read] = world.step(2)
    world.expected(image, read)


def test_what_comes_with_an_image_may_have_been_another_slots(world: World) -> None:
    """It is written after the step that reads it by way of slot 0, and before the next step of slot 1."""
    place = torch.zeros(1 << 20, device="cuda")
    matrix = torch.ones(1 << 20).pin_memory()
    image = world.image(0, 4)
    world.writer.load(0, image)
    with no_waiting():
        world.writer.before_step((0,))
        torch.cuda._sleep(LONG)
        before = place.clone()
        world.writer.after_step((0,))
        world.writer.load(1, image, [(place, matrix)])
        world.writer.before_step((1,))
        after = place.clone()
        world.writer.after_step((1,))
    assert not before.any() and bool(after.all())


def test_what_comes_with_a_clearing_is_written_after_the_slots_step(world: World) -> None:
    mark, none = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
    world.writer.load(0, world.image(0, 4))
    read = []
    with no_waiting():
        for sleep in (LONG, 0):
            world.writer.before_step((0,))
            torch.cuda._sleep(sleep)
            read.append(mark.clone())
            world.writer.after_step((0,))
            world.writer.clear(0, [(mark, none)])
    assert [int(value) for value in read] == [1, 0]


def test_a_foreign_image_changes_nothing(world: World) -> None:
    image = world.image(0, 4)
    world.writer.load(0, image)
    other = SlotImage("another layout", image.block, image.ranks, image.scales)
    with pytest.raises(ValueError, match="layout"):
        world.writer.load(0, other)
    with pytest.raises(ValueError, match="slot"):
        world.writer.load(3, image)
    world.expected(image, world.step(0)[0])
