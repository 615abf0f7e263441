"""Kinds of changes to be killed in: each makes a store, changes it, and knows what a crash may have left."""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors.numpy import save_file

from adapter_store import AdapterStore, DiskStore, ModelSpec, PushOptions, Ref
from lorafleet.migration import migrate
from tests.support.stores.media import Medium, versions_in

# One projection is so wide that an adapter takes more than a chunk, and everything else is small.
WIDE, RANK = 9216, 64
SPEC = ModelSpec(
    fingerprint="0" * 64,
    architecture="LlamaForCausalLM",
    num_layers=1,
    vocab_size=128,
    tied_head=False,
    hidden_size=WIDE,
    modules={
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (WIDE, WIDE)),
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), (WIDE, WIDE)),
        "embed_tokens": (128, WIDE),
        "lm_head": (WIDE, 128),
    },
    max_model_len=512,
    name="wide",
)
TENANT, NAME = "acme", "x"
_Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


@dataclass(frozen=True, slots=True)
class Told:
    """A change: what it was to do, and whether it was acknowledged; a child tells of each twice."""

    number: int
    done: bool
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    problems: Sequence[str]
    under_way: bool
    happened: bool = False  # what was under way


Tell = Callable[[Told], object]


class Scenario(Protocol):
    name: str
    span_s: float  # within which a child is killed: about two of its changes

    def prepare(self, medium: Medium) -> None: ...

    def act(self, store: AdapterStore, tell: Tell) -> None:
        """In the child: changes, one after the other."""
        ...

    def check(self, medium: Medium, told: Sequence[Told]) -> Found: ...


class Push:
    """New versions of one name; `latest` follows."""

    name, span_s = "push", 0.25

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "pushed"

    def prepare(self, medium: Medium) -> None:
        medium.open()

    def act(self, store: AdapterStore, tell: Tell) -> None:
        for number in range(1000):
            source = write_adapter(self._folder, number + 1)
            tell(Told(number, done=False))
            tell(Told(number, done=True, digest=store.put(source, TENANT, NAME, SPEC).digest))

    def check(self, medium: Medium, told: Sequence[Told]) -> Found:
        store = medium.open()
        acknowledged = [each.digest for each in told if each.done]
        there = whole_versions(store)
        problems = [f"acknowledged {digest} is gone" for digest in acknowledged if digest not in there]
        new = [digest for digest in there if digest not in acknowledged]
        under_way = bool(told) and not told[-1].done
        if len(new) > under_way:
            problems.append(f"{new} were not pushed")
        latest = [alias.digest for alias in store.aliases(TENANT)]
        if latest != (new or acknowledged[-1:]):
            problems.append(f"latest is at {latest}, not at {new or acknowledged[-1:]}")
        return Found(problems, under_way, bool(new))


class PushFacts:
    """The same content again and again, with other files beside it."""

    name, span_s = "push of other files", 0.12

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "facts"

    def prepare(self, medium: Medium) -> None:
        medium.open().put(self._source(0), TENANT, NAME, SPEC)

    def act(self, store: AdapterStore, tell: Tell) -> None:
        for number in range(1, 1000):
            source = self._source(number)
            tell(Told(number, done=False))
            tell(Told(number, done=True, digest=store.put(source, TENANT, NAME, SPEC).digest))

    def check(self, medium: Medium, told: Sequence[Told]) -> Found:
        store = medium.open()
        [digest] = whole_versions(store)
        found = int(store.find(Ref(TENANT, NAME, digest=digest)).push.base_model)
        done = max((each.number for each in told if each.done), default=0)
        under_way = bool(told) and not told[-1].done
        problems = []
        if found not in {done, done + under_way}:
            problems.append(f"the facts are those of push {found}, not of {done}")
        with tempfile.TemporaryDirectory() as folder:
            store.export(Ref(TENANT, NAME, digest=digest), Path(folder))
            config = json.loads((Path(folder) / "adapter_config.json").read_text())
        if config["base_model_name_or_path"] != str(found):
            problems.append(f"the files are of push {config['base_model_name_or_path']}, not {found}")
        return Found(problems, under_way, found > done)

    def _source(self, number: int) -> Path:
        return write_adapter(self._folder, 1, rank=1, base=str(number))


class MoveAlias:
    """One alias, to and fro between versions."""

    name, span_s = "alias move", 0.06

    def __init__(self, folder: Path) -> None:
        self._folders = [write_adapter(folder / f"move-{number}", number + 1, rank=1) for number in range(3)]

    def prepare(self, medium: Medium) -> None:
        store = medium.open()
        for folder in self._folders:
            store.put(folder, TENANT, NAME, SPEC, PushOptions(alias=None))

    def act(self, store: AdapterStore, tell: Tell) -> None:
        digests = sorted(version.digest for version in versions_in(store, TENANT))
        for number in range(100_000):
            tell(Told(number, done=False))
            alias = store.set_alias(TENANT, NAME, "prod", digests[number % 3], expected_generation=number)
            tell(Told(number, done=True, digest=alias.digest))

    def check(self, medium: Medium, told: Sequence[Told]) -> Found:
        store = medium.open()
        digests = sorted(whole_versions(store))
        problems = [] if len(digests) == 3 else [f"there are {len(digests)} versions, not 3"]
        moves = sum(each.done for each in told)
        under_way = bool(told) and not told[-1].done
        allowed = {moves, moves + under_way}
        found = [(alias.digest, alias.generation) for alias in store.aliases(TENANT)] or [("", 0)]
        generation = found[0][1]
        expected = digests[(generation - 1) % 3] if generation else ""
        if generation not in allowed or found != [(expected, generation)]:
            problems.append(f"after {moves} moves the alias is at {found}")
        return Found(problems, under_way, generation > moves)


class Collect:
    """Versions leave, and their content is collected; one with the same content under another name stays."""

    name, span_s = "gc", 0.15
    _count = 3

    def __init__(self, folder: Path) -> None:
        self._folders = [
            write_adapter(folder / f"gc-{number}", number + 1, rank=1) for number in range(self._count)
        ]

    def prepare(self, medium: Medium) -> None:
        store = medium.open()
        for number, folder in enumerate(self._folders):
            store.put(folder, TENANT, f"n{number}", SPEC)
        store.put(self._folders[0], TENANT, "stays", SPEC)

    def act(self, store: AdapterStore, tell: Tell) -> None:
        for number in range(self._count):
            tell(Told(number, done=False))
            store.withdraw(Ref(TENANT, f"n{number}", alias="latest"))
            store.collect(0, keep=lambda summary: False)
            tell(Told(number, done=True))

    def check(self, medium: Medium, told: Sequence[Told]) -> Found:
        store = medium.open()
        there = {version.name for version in versions_in(store, TENANT)}
        whole_versions(store)
        done = sum(each.done for each in told)
        under_way = bool(told) and not told[-1].done
        stays = {f"n{number}" for number in range(done + under_way, self._count)} | {"stays"}
        gone = {f"n{number}" for number in range(done)}
        problems = [f"{name} is gone" for name in stays - there] + [f"{n} is there" for n in gone & there]
        store.collect(0, keep=lambda summary: False)  # what had left, but was not collected
        left = {version.digest for version in versions_in(store, TENANT)}
        problems += [f"{digest} was not collected" for digest in medium.digests() - left]
        return Found(problems, under_way, under_way and f"n{done}" not in there)


class Migrate:
    """Versions of a store in a folder are copied, and what is said about them."""

    name, span_s = "migrate", 0.25
    _count = 3

    def __init__(self, folder: Path) -> None:
        self._source = folder / "source"
        store = DiskStore(self._source)
        for number in range(self._count):
            pushed = store.put(write_adapter(folder / "migrated", number + 1), TENANT, NAME, SPEC)
        store.set_alias(TENANT, NAME, "prod", pushed.digest)
        self._versions = [version.digest for version in versions_in(store, TENANT)]
        self._aliases = store.aliases(TENANT)

    def prepare(self, medium: Medium) -> None:
        medium.open()

    def act(self, store: AdapterStore, tell: Tell) -> None:
        def progress(done: int, total: int) -> None:
            if done:
                tell(Told(done - 1, done=True, digest=self._versions[done - 1]))
            if done < total:
                tell(Told(done, done=False))

        migrate(DiskStore(self._source), store, SPEC, on_progress=progress)

    def check(self, medium: Medium, told: Sequence[Told]) -> Found:
        store = medium.open()
        there = whole_versions(store)
        copied = [each.digest for each in told if each.done]
        under_way = bool(told) and not told[-1].done
        problems = [f"{digest} was copied and is gone" for digest in copied if digest not in there]
        if len(there) > len(copied) + under_way:
            problems.append(f"{len(there)} versions are there after {len(copied)} were copied")
        resumed = migrate(DiskStore(self._source), store, SPEC)
        if resumed.failed or resumed.present != len(there):
            problems.append(f"resumed at {len(there)} versions: {resumed}")
        if sorted(whole_versions(store)) != self._versions or store.aliases(TENANT) != self._aliases:
            problems.append("a resumed migration does not end with what the source has")
        return Found(problems, under_way, len(there) > len(copied))


def whole_versions(store: AdapterStore) -> set[str]:
    """The digests of all versions; each is read and hashed. Raises DataLoss."""
    found = set()
    for version in versions_in(store, TENANT):
        ref = Ref(TENANT, version.name, digest=version.digest)
        store.verify(ref)
        store.open(version.digest).close()
        found.add(version.digest)
    return found


def write_adapter(folder: Path, alpha: int, rank: int = RANK, base: str = "") -> Path:
    """The same tensors every time; `alpha` makes it another version, `base` does not."""
    folder.mkdir(exist_ok=True)
    weights = folder / "adapter_model.safetensors"
    if not weights.exists():
        save_file(_tensors(rank), weights)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def _tensors(rank: int) -> Mapping[str, np.ndarray]:
    chance = np.random.default_rng(0)
    a, b = chance.random((rank, WIDE), np.float32), chance.random((WIDE, rank), np.float32)
    return {f"{_Q_PROJ}.lora_A.weight": a, f"{_Q_PROJ}.lora_B.weight": b}


SCENARIOS: Sequence[Callable[[Path], Scenario]] = (Push, PushFacts, MoveAlias, Collect, Migrate)
