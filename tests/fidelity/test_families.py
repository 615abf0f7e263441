"""Tiny random models of every family, through real services: cold, from the prefix cache, and preempted."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lorafleet import Client
from tests.fidelity.conftest import DEVICES
from tests.fidelity.families import FAMILIES, make_family
from tests.support.adapters.peft import DENSE, TABLES
from tests.support.services.fleet import read_metrics, running_fleet


@pytest.mark.timeout(600)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_family_equals_peft(
    family: str,
    device: tuple[str, ...],
    expect: Callable,
    ask: Callable,
    assert_equal: Callable,
    tmp_path: Path,
) -> None:
    model, streams = make_family(family, tmp_path)
    modules = ("--lora-modules", ",".join((*DENSE, *TABLES)), "--max-lora-rank", "16", "--max-loras", "2")
    with running_fleet(
        model, tmp_path / "store", *modules, *device, "--block-size", "4", "--num-kv-blocks", "60"
    ) as fleet:
        with Client(fleet.target) as client:
            for stream in streams[1:]:
                client.adapters.push(stream.adapter, stream.name)

        def counted(name: str) -> float:
            return read_metrics(fleet.executor_metrics[0])[f"lorafleet_executor_{name}_total"]

        answers = ask(fleet.target, streams)
        expected = expect(model, streams, [answer.token_ids for answer in answers])
        assert_equal(streams, answers, expected)
        assert counted("page_ins") >= len(streams) - 1

        again = [stream for stream in streams for _ in range(2)]
        hits = counted("prefix_cache_hit_tokens")
        assert_equal(again, ask(fleet.target, again, at_once=False), expected)
        assert counted("prefix_cache_hit_tokens") > hits

        preemptions = counted("preemptions")
        assert_equal(streams * 4, ask(fleet.target, streams * 4), expected)
        assert counted("preemptions") > preemptions
