"""Two schedulers and two executors over one store, as operators run them."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lorafleet import AdapterNotFound, Client, IncompatibleAdapter, Unavailable
from lorafleet.cli import main
from lorafleet.v1.adapters_pb2 import RESIDENCY_TIER_HOST, PinRequest
from tests.support.services.cluster import PATIENCE_S, Cluster, Node, wait_until
from tests.support.services.failures import raw_stubs
from tests.support.services.streams import watch
from tests.support.stores.redis_server import RedisServer

PROMPT = [17, 29, 31, 43] * 4
STALENESS_S = (0.5, 1.0)  # --alias-max-staleness of each scheduler
SLOTS = ("--max-loras", "3", "--max-lora-rank", "16", "--max-seats", "8")


@dataclass(frozen=True)
class Fleet:
    schedulers: tuple[Node, Node]
    executors: tuple[Node, Node]
    caches: tuple[Path, Path]
    server: RedisServer | None

    def clients(self) -> tuple[Client, Client]:
        here, there = (Client(each.address, timeout=PATIENCE_S) for each in self.schedulers)
        return here, there

    def copies_on_disk(self, digest: str) -> list[Path]:
        name = digest.removeprefix("sha256:")
        return [path for cache in self.caches for path in (cache / "entries").glob(name)]


@pytest.fixture(scope="module", params=["disk", "redis"])
def fleet(
    request: pytest.FixtureRequest, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("upkeep")
    server = RedisServer(folder / "redis").start() if request.param == "redis" else None
    with Cluster(cluster.model, folder, store_url=f"{server.url}?timeout=2" if server else "") as nodes:
        caches = (folder / "cache-0", folder / "cache-1")
        cached = [("--cache-dir", str(cache), "--cache-bytes", "100000000") for cache in caches]
        executors = [nodes.executor(f"executor-{i}", *SLOTS, *cached[i]).start() for i in range(2)]
        schedulers = [
            nodes.scheduler(
                f"scheduler-{i}", executors, "--delete-grace", "0", "--alias-max-staleness", str(staleness)
            ).start()
            for i, staleness in enumerate(STALENESS_S)
        ]
        for node in (*executors, *schedulers):
            node.wait_ready()
        yield Fleet((schedulers[0], schedulers[1]), (executors[0], executors[1]), caches, server)
    if server:
        server.kill()


def serving(client: Client, ref: str, session: str | None = None) -> str:
    answer = client.generate(PROMPT, adapter=ref, max_new_tokens=2, session_id=session or "")
    return answer.adapter_digest


def answers(client: Client, ref: str) -> bool:
    try:
        return bool(serving(client, ref))
    except AdapterNotFound:
        return False


def test_every_scheduler_sees_a_move_and_a_split_alike(fleet: Fleet, adapter: Callable[..., Path]) -> None:
    here, there = fleet.clients()
    with here, there:
        first = here.adapters.push(adapter("canary-1"), "canary", alias="v1").version.digest
        second = here.adapters.push(adapter("canary-2"), "canary", alias="v2").version.digest
        here.adapters.set_alias("canary@prod", "v1")
        wait_until(lambda: answers(there, "canary@prod"), "the other scheduler knows it")
        assert serving(there, "canary@prod") == first

        alias = here.adapters.set_alias("canary@prod", {"v1": 3, "v2": 1})
        assert alias.targets == {first: 3, second: 1}
        sessions = [f"session-{number}" for number in range(24)]
        split = {session: serving(here, "canary@prod", session) for session in sessions}
        assert set(split.values()) == {first, second}
        wait_until(
            lambda: {serving(there, "canary@prod", session) for session in sessions} == {first, second},
            "the other scheduler splits",
        )
        assert {session: serving(there, "canary@prod", session) for session in sessions} == split

        there.adapters.set_alias("canary@prod", {"v1": 1, "v2": 1})
        wait_until(lambda: here.adapters.aliases("canary")[0].generation == 3, "the weights are told")
        wait_until(
            lambda: {s: serving(here, "canary@prod", s) for s in sessions} != split, "more of them move"
        )
        for session in sessions:  # from v1 to v2, and never back
            assert serving(here, "canary@prod", session) in (split[session], second)

        there.adapters.set_alias("canary@prod", "v1")  # rolled back
        wait_until(
            lambda: {serving(here, "canary@prod", session) for session in sessions} == {first}, "the rollback"
        )
        served = {name for name in fleet.schedulers[0].metrics() if "version_requests_total" in name}
        assert {digest for digest in (first, second) if any(digest in name for name in served)} == {
            first,
            second,
        }


def test_no_scheduler_serves_what_an_alias_left_longer_than_its_staleness(
    fleet: Fleet, adapter: Callable[..., Path]
) -> None:
    """Beyond it an answer is from the new version, or UNAVAILABLE where the store was not heard in time."""
    here, there = fleet.clients()
    with here, there:
        versions = [
            here.adapters.push(adapter(f"canary-{n}"), "moving", alias=f"v{n}").version.digest for n in (1, 2)
        ]
        here.adapters.set_alias("moving@prod", "v1")
        wait_until(lambda: answers(there, "moving@prod"), "the other scheduler knows it")
        for turn, mover in enumerate((here, there) * 3):
            target = versions[(turn + 1) % 2]
            mover.adapters.set_alias("moving@prod", target)
            moved_at = time.monotonic()
            served = dict.fromkeys((here, there), 0)
            while min(served.values()) < 5:
                for client, staleness in zip((here, there), STALENESS_S, strict=True):
                    asked_at = time.monotonic()
                    try:
                        found = serving(client, "moving@prod")
                    except Unavailable:
                        continue
                    if client is mover or asked_at - moved_at > staleness:
                        assert found == target
                        served[client] += 1


def test_a_drain_frees_slot_host_and_disk_everywhere(fleet: Fleet, adapter: Callable[..., Path]) -> None:
    here, there = fleet.clients()
    with here, there:
        digest = here.adapters.push(adapter("draining"), "draining").version.digest
        pinned = here.adapters.pin("draining", "slot")
        assert pinned.missing == () and len(pinned.executors) == 2
        rows = here.adapters.residency("draining")
        assert {(row.executor, row.tier) for row in rows} >= {(each, "slot") for each in pinned.executors}
        wait_until(
            lambda: (
                {row.executor for row in here.adapters.residency("draining") if row.tier == "disk"}
                == {*pinned.executors}
            ),
            "their disks are told",
        )
        assert all(row.max_rank == 4 and row.adapters == ("default/draining",) for row in rows)
        assert len(fleet.copies_on_disk(digest)) == 2
        reading = watch(there, PROMPT, 300, adapter=f"draining@{digest}")
        reading.wait_for(2)
        assert here.adapters.drain("draining").digest == digest
        wait_until(lambda: here.adapters.drain("draining").remaining == (), "all executors are drained")
        assert len(reading.wait_end().tokens) == 300  # accepted by the other scheduler: to its end
        wait_until(
            lambda: all(row.digest != digest for row in here.adapters.residency()), "no executor has a copy"
        )
        wait_until(lambda: not fleet.copies_on_disk(digest), "no disk has a copy")
        for client in (here, there):
            wait_until(lambda client=client: not answers(client, f"draining@{digest}"), "nobody admits it")
        (version,) = here.adapters.list("draining")
        assert version.state == "draining"
        here.adapters.push(adapter("draining"), "draining")
        assert serving(here, "draining") == digest


def test_a_pin_that_never_loads_is_counted_and_holds_no_other_up(
    fleet: Fleet, adapter: Callable[..., Path]
) -> None:
    """Of three pins the one in the middle has more rank than any slot."""
    scheduler, addresses = fleet.schedulers[0], {each.address for each in fleet.executors}
    gauges = [f"lorafleet_scheduler_missing_pins{{executor={address}}}" for address in addresses]

    def missing() -> list[float]:
        metrics = scheduler.metrics()
        return [metrics[gauge] for gauge in gauges]

    def has_tried(executor: Node) -> bool:
        return "lorafleet_executor_adapter_loads_total{result=INCOMPATIBLE_ADAPTER}" in executor.metrics()

    def keepers(ref: str) -> set[str]:
        return {row.executor for row in client.adapters.residency(ref) if row.pinned}

    with Client(scheduler.address) as client, raw_stubs(scheduler.address) as stubs:
        for name, rank in (("good-1", 8), ("tall", 32), ("good-2", 8)):
            client.adapters.push(adapter(name, rank=rank), name)
        assert missing() == [0, 0]
        pins = [
            stubs.adapters.Pin.future(PinRequest(adapter=name, tier=RESIDENCY_TIER_HOST))
            for name in ("good-1", "tall", "good-2")
        ]
        assert [pins[number].result().missing for number in (0, 2)] == [[], []]
        wait_until(lambda: all(map(has_tried, fleet.executors)), "both have tried the other")
        assert missing() == [1, 1]
        assert (keepers("good-1"), keepers("tall"), keepers("good-2")) == (addresses, set(), addresses)
        client.adapters.unpin("tall")
        assert missing() == [0, 0]
        for name in ("good-1", "good-2"):
            client.adapters.unpin(name)


def test_rm_lets_streams_end_and_gc_frees_the_bytes(fleet: Fleet, adapter: Callable[..., Path]) -> None:
    here, there = fleet.clients()
    with here, there:
        digest = here.adapters.push(adapter("leaving"), "leaving").version.digest
        wait_until(lambda: answers(there, "leaving"), "the other scheduler knows it")
        reading = watch(there, PROMPT, 1000, adapter="leaving")
        reading.wait_for(2)
        here.adapters.delete("leaving")
        assert here.adapters.collect().versions == ()  # an executor has it
        for client in (here, there):
            wait_until(lambda client=client: not answers(client, f"leaving@{digest}"), "nobody admits it")
        assert len(reading.wait_end().tokens) == 1000
        wait_until(lambda: bool(here.adapters.collect(dry_run=True).versions), "nobody uses it any more")
        gone = here.adapters.collect()
        assert gone.versions == (f"default/leaving@{digest}",) and gone.num_bytes > 0
        assert [s.digest for s in here.adapters.summaries("leaving", deleted=True)] == []
        assert here.adapters.verify().damaged == {} and here.adapters.verify().orphans == ()


def test_rm_now_ends_streams_of_other_schedulers(fleet: Fleet, adapter: Callable[..., Path]) -> None:
    here, there = fleet.clients()
    with here, there:
        digest = here.adapters.push(adapter("banned"), "banned").version.digest
        wait_until(lambda: answers(there, "banned"), "the other scheduler knows it")
        stream = there.stream(PROMPT, adapter="banned", max_new_tokens=3000, ignore_eos=True)
        next(stream)
        here.adapters.delete(f"banned@{digest}", force=True, now=True)
        with pytest.raises(IncompatibleAdapter, match="was removed") as caught:
            for _ in stream:
                pass
        assert caught.value.reason == "ADAPTER_REMOVED"


def test_while_the_store_is_paused_digests_are_served_and_aliases_are_not(
    fleet: Fleet, adapter: Callable[..., Path]
) -> None:
    if fleet.server is None:
        pytest.skip("a folder cannot be paused")
    here, there = fleet.clients()
    with here, there:
        digest = here.adapters.push(adapter("canary-1"), "paused").version.digest
        wait_until(lambda: answers(there, "paused"), "the other scheduler knows it")
        for client in (here, there):
            serving(client, f"paused@{digest}")
        for scheduler in fleet.schedulers:
            scheduler.wait_for_news()  # what is known was read after that of the push
        fleet.server.pause()
        try:
            for client in (here, there):
                wait_until(lambda client=client: _is_unavailable(client, "paused"), "no alias is certain")
                for _ in range(20):
                    assert serving(client, f"paused@{digest}") == digest
        finally:
            fleet.server.go_on()
        for client in (here, there):
            wait_until(lambda client=client: not _is_unavailable(client, "paused"), "aliases are back")


def test_operators_commands(
    fleet: Fleet,
    adapter: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LORAFLEET_TARGET", fleet.schedulers[0].address)

    def run(command: str, status: int = 0) -> str:
        assert main(command.split()) == status, capsys.readouterr()
        return capsys.readouterr().out

    many = tmp_path / "many"
    for number in (1, 2):
        shutil.copytree(adapter(f"command-{number}"), many / f"cmd-{number}")
    shutil.make_archive(str(tmp_path / "one"), "gztar", adapter("command-2"))
    broken = shutil.copytree(adapter("command-1"), many / "cmd-broken")
    (broken / "adapter_model.safetensors").write_bytes(b"no tensors")
    outcomes = json.loads(run(f"adapters push-all {many} --dry-run --json", 1))
    assert [bool(outcome["error"]) for outcome in outcomes] == [False, False, True]
    assert "cmd-1" not in run("adapters list --match cmd-*")
    assert "cmd-broken refused: " in run(f"adapters push-all {many}", 1)
    run(f"adapters push {tmp_path / 'one.tar.gz'} cmd-1 --alias v2")
    rows = run("adapters list --match cmd-* --sort pushed").splitlines()
    assert sorted(row.split()[0] for row in rows[1:3]) == ["default/cmd-1", "default/cmd-2"]
    assert rows[3].split()[0] == "default/cmd-1"
    assert len(json.loads(run("adapters list --match cmd-* --json"))) == 3
    assert "only the values of the weights differ" in run("adapters diff cmd-1@latest cmd-1@v2", 1)
    assert "the same content" in run("adapters diff cmd-2 cmd-1@v2")
    assert " 90 to sha256:" in run("adapters alias set cmd-1@prod latest=90 v2=10")
    assert "=90 " in run("adapters alias list cmd-1") or "=10 " in run("adapters alias list cmd-1")
    assert "is protected" in run("adapters protect cmd-2")
    run("adapters rm cmd-2", 1)
    run("adapters unprotect cmd-2")

    one = fleet.executors[0].address
    assert one in run(f"adapters pin cmd-2 --tier host --executor {one}")
    assert " host " in run("adapters residency cmd-2") and "pinned" in run("adapters residency cmd-2")
    run("adapters unpin cmd-2")
    run("adapters drop cmd-2", 1)  # cmd-1@v2 has the same content
    run("adapters rm cmd-1@v2", 1)
    run("adapters rm cmd-1@v2 --force")
    run("adapters drop cmd-2")
    assert len(run("adapters residency cmd-2").splitlines()) == 1
    # On a busy machine an executor may be taken for hung for a moment, which is told.
    wait_until(lambda: main(["adapters", "drain", "cmd-2"]) == 0, "all executors are drained")
    assert "drained sha256:" in capsys.readouterr().out
    assert "draining" in run("adapters list cmd-2")
    assert "deleted" in run("adapters list cmd-1 --deleted")
    assert "would go" in run("adapters gc --dry-run")
    assert "versions, " in run("adapters gc")
    assert "deleted" not in run("adapters list cmd-1 --deleted")
    assert "0 damaged, 0 orphans" in run("adapters verify")
    wait_until(lambda: "2 of 2 executors ready" in run("top --once"), "both are ready")
    assert len(json.loads(run("top --once --json"))["executors"]) == 2


def _is_unavailable(client: Client, ref: str) -> bool:
    try:
        serving(client, ref)
    except Unavailable:
        return True
    return False


def test_an_executor_is_taken_out_of_service_and_back(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    target, address = fleet.schedulers[0].address, fleet.executors[0].address

    def run(*arguments: str) -> str:
        assert main(["executors", *arguments, address, "--target", target]) == 0
        return capsys.readouterr().out

    with Client(target, timeout=PATIENCE_S) as client:

        def cordoned() -> list[str]:
            return [each.address for each in client.fleet().executors if each.cordoned]

        assert run("drain") == f"{address} gets no new requests, and has none left\n"
        assert cordoned() == [address]
        assert json.loads(run("cordon", "--json"))["cordoned"]
        assert client.generate(PROMPT, max_new_tokens=2).usage.completion_tokens == 2
        assert run("uncordon") == f"{address} gets requests again\n"
        assert cordoned() == []
    assert main(["executors", "cordon", "nowhere:1", "--target", target]) == 1
    assert address in capsys.readouterr().err
