"""What a pushed folder says about text holds for its answers: real services, a certain next token."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from lorafleet import FinishReason
from tests.support.services.cluster import Cluster, Pair


def test_an_adapter_s_own_end_ends_its_answers_and_no_others(
    main: Pair, cluster: Cluster, adapter: Callable[..., Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(adapter("ends"), tmp_path / "ends"))
    tokenizer = json.loads((cluster.model / "tokenizer.json").read_text())
    [end] = [token["id"] for token in tokenizer["added_tokens"] if token["content"] == "<|endoftext|>"]
    with main.client("ops") as client:
        client.adapters.push(folder, "plain-ends")
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
        client.adapters.push(folder, "own-ends")
        ask = {"max_new_tokens": 5, "logit_bias": {end: 100.0}}
        own = client.generate("Hello", adapter="own-ends", **ask)
        assert (own.finish_reason, own.token_ids, own.text) == (FinishReason.STOP, (end,), "")
        for name in ("plain-ends", None):
            other = client.generate("Hello", adapter=name, **ask)
            assert (other.finish_reason, other.token_ids) == (FinishReason.LENGTH, (end,) * 5)
        ignoring = client.generate("Hello", adapter="own-ends", ignore_eos=True, **ask)
        assert ignoring.token_ids == (end,) * 5
        for name in ("plain-ends", "own-ends"):
            client.adapters.delete(name)
