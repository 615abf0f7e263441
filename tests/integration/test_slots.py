"""Few slots, many adapters: nobody waits behind what cannot run, nothing is left over, failures end alone."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from lorafleet import Client, DataLoss, InvalidRequest
from lorafleet.v1 import common_pb2, inference_pb2
from tests.support.adapters.oracle import Oracle
from tests.support.adapters.peft import DENSE, edit_config, make_adapter
from tests.support.services.cluster import Cluster, Pair, wait_until
from tests.support.services.failures import raw_stubs
from tests.support.services.streams import Watched, undisturbed, watch

PROMPT = [12, 23, 34, 45] * 5
NAMES = [f"l{number}" for number in range(1, 6)]


@pytest.fixture(scope="module", autouse=True)
def pushed(main: Pair, adapter: Callable[..., Path]) -> None:
    with main.client("ops") as client:
        for name in NAMES:
            client.adapters.push(adapter(name), name)


@pytest.fixture(autouse=True)
def all_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in {"main", "one", "two"} & set(request.fixturenames):
        request.getfixturevalue(name).wait_idle()


def answers_alone(client: Client, names: list[str], num_tokens: int = 40) -> dict[str, tuple[int, ...]]:
    """By adapter, "" for the base: asked one after the other."""
    found = {name: undisturbed(client, PROMPT, num_tokens, adapter=name or None).token_ids for name in names}
    assert len(set(found.values())) == len(found)
    return found


def all_at_once(client: Client, names: list[str], num_tokens: int = 40) -> list[tuple[int, ...]]:
    def one(name: str) -> tuple[int, ...]:
        return client.generate(
            PROMPT, adapter=name or None, max_new_tokens=num_tokens, ignore_eos=True
        ).token_ids

    with ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(one, names))


def test_more_adapters_than_slots(two: Pair) -> None:
    """The base takes no slot; of the adapters, two at a time run and the others wait."""
    with two.client() as client:
        alone = answers_alone(client, ["", *NAMES])
        for names in (["l1", "l2", ""], ["l1", "l2", "l3", ""], [*NAMES, *NAMES, "", *NAMES]):
            assert all_at_once(client, names) == [alone[name] for name in names]


def test_cancelled_requests_hold_nothing(two: Pair, adapter: Callable[..., Path]) -> None:
    """30 requests over 3 adapters, 4 running at most: cancelled while waiting, in prefill, while decoding, at
    their last token, and twice. All others are answered, and then nothing holds the adapters."""
    draw = random.Random(3)
    names = ["gone1", "gone2", "gone3"]
    with two.client() as client, raw_stubs(two.scheduler.address) as stubs:
        for name in names:
            client.adapters.push(adapter(name), name)
        alone = answers_alone(client, names)
        calls = []
        for number in range(30):
            request = inference_pb2.GenerateRequest(
                adapter=names[number % 3],
                token_ids=inference_pb2.TokenIds(ids=PROMPT),
                stopping=common_pb2.Stopping(max_new_tokens=40, ignore_eos=True),
            )
            calls.append((names[number % 3], stubs.inference.GenerateStream(request)))
        victims = draw.sample(range(30), 13)
        for number, victim in enumerate(victims):
            call = calls[victim][1]
            received = 0
            while received < (0, 0, 1, 20, 40)[number % 5]:
                received += len(next(call).token_ids)
            call.cancel()
            call.cancel()
        for number, (name, call) in enumerate(calls):
            if number not in victims:
                assert tuple(token for chunk in call for token in chunk.token_ids) == alone[name]
            elif not call.done():
                with pytest.raises(grpc.RpcError):
                    list(call)
        two.wait_idle()
        for name in names:
            client.adapters.delete(name)
            assert client.adapters.list(name) == ()


def test_a_failed_load_fails_its_requests_alone(
    two: Pair, cluster: Cluster, adapter: Callable[..., Path]
) -> None:
    with two.client() as client:
        alone = answers_alone(client, ["l1", "l2"])
        digest = client.adapters.push(adapter("hollow"), "hollow").version.digest
        packed = cluster.store / "blobs" / digest.removeprefix("sha256:") / "packed.safetensors"
        packed.write_bytes(packed.read_bytes()[:-1] + b"\x55")
        with two.client() as leaving:
            watch(leaving, PROMPT, 10, adapter="hollow")
            bad = [watch(client, PROMPT, 10, adapter="hollow") for _ in range(3)]
            assert all_at_once(client, ["l1", "l2", "l1"]) == [alone[name] for name in ("l1", "l2", "l1")]
        for stream in bad:
            assert isinstance(stream.wait_end().error, DataLoss), stream.error
        client.adapters.push(adapter("hollow-2"), "hollow")
        assert client.generate(PROMPT, adapter="hollow", max_new_tokens=2).token_ids
        client.adapters.delete("hollow")


def test_a_reused_slot_has_no_leftovers(one: Pair, cluster: Cluster, adapter: Callable[..., Path]) -> None:
    """Fewer modules, lower ranks and fewer layers after more of them, in the only slot."""
    kinds: dict[str, dict[str, Any]] = {
        "full": {"rank": 16, "targets": DENSE, "std": 0.1},
        "query": {"rank": 4, "targets": ["q_proj"], "std": 0.4},
        "thin": {"rank": 4, "targets": DENSE},
        "top": {"rank": 8, "targets": ["v_proj", "o_proj"], "layers": [1], "std": 0.3},
    }
    prompt = [13, 23, 34, 45] * 5
    oracle = Oracle(cluster.model)
    expected = {"": oracle.greedy(None, prompt, 12)}
    with one.client() as client:
        for name, fields in kinds.items():
            client.adapters.push(adapter(name, **fields), name)
            expected[name] = oracle.greedy(adapter(name), prompt, 12)
        assert min(gap for run in expected.values() for gap in run.gaps) > 1e-3, "choose another prompt"
        before = one.executor.count("page_ins")
        order = [
            "full",
            "query",
            "full",
            "query",
            "full",
            "thin",
            "full",
            "",
            "full",
            "top",
            "full",
            "top",
            "",
        ]
        for number, name in enumerate(order):
            answer = client.generate(
                prompt, adapter=name or None, max_new_tokens=12, ignore_eos=True, cache_salt=str(number)
            )
            assert list(answer.token_ids) == expected[name].tokens, name
        assert one.executor.count("page_ins") - before == 10  # one for each change of adapter


def test_nobody_waits_behind_an_adapter_without_a_slot(main: Pair) -> None:
    """While four adapters hold the four slots, requests for the fifth wait, and all others run."""
    with main.client("ops") as client:
        holders = [watch(client, PROMPT, 4000, adapter=name) for name in NAMES[:4]]
        for holder in holders:
            holder.wait_for(1)
        fifth = [watch(client, PROMPT, 5, adapter="l5") for _ in range(4)]
        wait_until(lambda: main.scheduler.metrics()["lorafleet_scheduler_queue_requests"] == 4, "four wait")
        for name in (None, None, "l1", "l2", "l3", None):
            assert client.generate(PROMPT, adapter=name, max_new_tokens=3).token_ids
        assert not any(holder.ended for holder in holders), "the holders were too short"
        assert not any(stream.tokens for stream in fifth)
    for stream in [*holders, *fifth]:
        stream.wait_end()


def test_a_cold_adapter_gets_its_turn_from_a_hot_one(one: Pair) -> None:
    """One slot and no end of requests for A: B starts after one aging interval and what A has running."""
    with one.client() as client:
        answers: list[int] = []
        running = True

        def flood() -> None:
            while running:
                answers.append(len(client.generate(PROMPT, adapter="l1", max_new_tokens=20).token_ids))

        with ThreadPoolExecutor(8) as pool:  # 4 run, 4 wait, at any time
            floods = [pool.submit(flood) for _ in range(8)]
            try:
                wait_until(lambda: len(answers) >= 8, "the flood")
                for _ in range(3):
                    cold = watch(client, PROMPT, 5, adapter="l2")
                    cold.wait_for(1)
                    assert cold.wait_end().error is None
                    before = len(answers)
                    wait_until(lambda: len(answers) > before, "the flood goes on")  # noqa: B023
            finally:
                running = False
            for each in floods:
                each.result()


def test_pushes_and_loads_change_no_running_stream(
    main: Pair, adapter: Callable[..., Path], cluster: Cluster, tmp_path: Path
) -> None:
    """8 streams over 4 adapters; meanwhile 15 adapters come and are asked for, and 5 broken ones come."""
    new = [adapter(f"new{number}") for number in range(15)]
    broken = make_adapter(tmp_path / "broken", cluster.model, seed=1)
    edit_config(broken, use_dora=True)
    with main.client("ops") as client, ThreadPoolExecutor(4) as pool:  # as many pushes as are taken
        alone = answers_alone(client, NAMES[:4], 200)
        streams = [(name, watch(client, PROMPT, 200, adapter=name)) for name in NAMES[:4] * 2]
        for _, stream in streams:
            stream.wait_for(1)

        def push(folder: Path) -> Watched:
            client.adapters.push(folder, folder.name)
            return watch(client, PROMPT, 3, adapter=folder.name)

        good = [pool.submit(push, folder) for folder in new]
        bad = [pool.submit(client.adapters.push, broken, "broken") for _ in range(5)]
        for failed in bad:
            assert isinstance(failed.exception(), InvalidRequest)
        for name, stream in streams:
            stream.wait_end()
            assert tuple(stream.tokens) == alone[name], name
        for pushed in good:
            assert len(pushed.result().wait_end().tokens) == 3
