"""Files of several trainers and versions for the same experts, in one batch: each row by its own adapter."""

import random
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from adapter_store import DiskStore, ModelSpec
from tests.fidelity.conftest import NUM_TOKENS, Expected, Stream
from tests.support.adapters.expert_files import ExpertAdapter
from tests.support.adapters.moe_models import ATTENTION, make_moe_adapter, make_moe_base
from tests.support.engines.driver import greedy, make_driver

PROMPT_SEED = 1


def draw(seed: int) -> ExpertAdapter:
    return ExpertAdapter.draw(4, 2, 64, 24, seed=seed)


def make_files(model: Path, folder: Path) -> dict[str, tuple[Path, Path]]:
    """Name -> (what is pushed, what PEFT is given): the same adapter."""
    some, one = draw(3).only((1, 3)), draw(4).only((3,))
    every = draw(2).one_by_one(folder / "every")
    attention = make_moe_adapter(folder / "attention", model, seed=5, modules=ATTENTION)
    return {
        "before 0.19": (draw(1).before_019(folder / "old"), draw(1).now(folder / "old, now")),
        # PEFT reads these itself, into a pair of twice the rank for gate and up.
        "every expert": (every, every),
        "some experts": (draw(3).one_by_one(folder / "some", experts=(1, 3)), some.now(folder / "some, now")),
        "expert 3 only": (one.now(folder / "one"), one.now(folder / "one, now")),
        "no experts": (attention, attention),
    }


@pytest.mark.parametrize(("slots", "copies"), [(1, 2), (5, 1)])
def test_layouts_in_one_batch(
    slots: int, copies: int, expect: Callable[[Path, Sequence[Stream]], Expected], tmp_path: Path
) -> None:
    """With all slots in use beside base rows, and with one slot for all in turn. "expert 3 only" would show
    an expert's columns given to another, "before 0.19" a matrix read the wrong way round."""
    model = make_moe_base(tmp_path / "model", "qwen3-moe")
    files = make_files(model, tmp_path)
    rng = random.Random(PROMPT_SEED)
    prompts = {name: tuple(rng.randrange(3, 128) for _ in range(9)) for name in ("base", *files)}
    oracle = [Stream("base", None, prompts["base"])]
    oracle += [Stream(name, folder, prompts[name]) for name, (_, folder) in files.items()]
    expected = expect(model, oracle)
    store, spec = DiskStore(tmp_path / "store"), ModelSpec.from_folder(model)
    digests = {
        name: store.put(folder, "default", name.replace(" ", "-"), spec).digest
        for name, (folder, _) in files.items()
    } | {"base": ""}
    driver = make_driver(
        str(model), store, max_loras=slots, lora_modules=(*ATTENTION, "experts"), torch_threads=1
    )
    names = [name for name in prompts for _ in range(copies)]
    with closing(driver.engine):
        answers = driver.run(
            *(
                greedy(f"{name} {i}", prompts[name], digest=digests[name], max_new_tokens=NUM_TOKENS)
                for i, name in enumerate(names)
            )
        )
    for name, tokens in zip(names, answers, strict=True):
        assert tokens == expected[name].tokens, name
