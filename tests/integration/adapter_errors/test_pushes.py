"""Wrong adapters and uploads: refused by name, nothing stays behind, a stream beside them unchanged."""

import pickle
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from lorafleet.v1 import adapters_pb2 as pb
from tests.support.adapters.broken import (
    CONFIG,
    WEIGHTS,
    Files,
    Tensors,
    ask_for,
    config,
    ours,
    push_failure,
    tensors,
)
from tests.support.adapters.peft import load_base, make_adapter, make_base
from tests.support.services.cluster import Pair
from tests.support.services.failures import Stubs, bearer, failure, piece, push_parts
from tests.support.services.streams import undisturbed

Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def without(name: str, files: Files) -> Files:
    return {other: data for other, data in files.items() if other != name}


def replaced(name: str, data: bytes, files: Files) -> Files:
    return {**files, name: data}


def as_pickle(files: Files) -> Files:
    return {**files, WEIGHTS: pickle.dumps({"a": [1.0]})}


def with_nan(weights: Tensors) -> None:
    weights[Q0][1, 2] = float("nan")


def with_odd_name(weights: Tensors) -> None:
    weights["base_model.model.model.layers.0.self_attn.qq_proj.lora_A.weight"] = weights[Q0].clone()


def with_extra_layer(weights: Tensors) -> None:
    for side in ("A", "B"):
        name = Q0.replace("lora_A", f"lora_{side}")
        weights[name.replace("layers.0", "layers.7")] = weights[name].clone()


def with_transposed(weights: Tensors) -> None:
    weights[Q0] = weights[Q0].T.contiguous()


MALFORMED: dict[str, tuple[Callable[[Files], Files], str]] = {
    "nan": (partial(tensors, with_nan), Q0),
    "missing half": (partial(tensors, lambda weights: weights.pop(Q0)), "layers.0.self_attn.q_proj"),
    "unknown tensor": (partial(tensors, with_odd_name), "qq_proj"),
    "wrong shape": (partial(tensors, with_transposed), "q_proj"),
    "no tensors": (partial(tensors, dict.clear), WEIGHTS),
    "pickle": (as_pickle, WEIGHTS),
    "cut off": (lambda files: {**files, WEIGHTS: files[WEIGHTS][:-100]}, WEIGHTS),
    "pointer": (
        partial(replaced, WEIGHTS, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        WEIGHTS,
    ),
    "huge header": (
        lambda files: {**files, WEIGHTS: (1 << 60).to_bytes(8, "little") + files[WEIGHTS][8:]},
        WEIGHTS,
    ),
    "extra bytes": (lambda files: {**files, WEIGHTS: files[WEIGHTS] + b"x"}, WEIGHTS),
    "empty weights": (partial(replaced, WEIGHTS, b""), WEIGHTS),
    "no weights": (partial(without, WEIGHTS), WEIGHTS),
    "no config": (partial(without, CONFIG), CONFIG),
    "config is no JSON": (partial(replaced, CONFIG, b"{"), CONFIG),
    "DoRA": (partial(config, use_dora=True), "use_dora"),
    "biases": (partial(config, lora_bias=True), "lora_bias"),
    "unknown field": (partial(config, use_magic=True), "use_magic"),
    "wrong rank": (partial(config, r=5), "rank"),
    "template": (
        partial(replaced, "chat_template.jinja", b"{% for m in messages %}"),
        "chat_template.jinja: the chat template is not valid in line 1",
    ),
    "empty template": (partial(replaced, "chat_template.jinja", b""), "chat_template.jinja is empty"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_adapters_are_refused_by_name(stubs: Stubs, files: Files, case: str) -> None:
    """Cut uploads, pickles, and configs that promise what the weights do not hold."""
    change, named = MALFORMED[case]
    for dry_run in (True, False):
        found = push_failure(stubs, change(files), dry_run=dry_run)
        ours(found, "INVALID_ARGUMENT", "INVALID_REQUEST")
        assert found.fields == ("adapter",) and named in found.message, found.message
    ask = ask_for("broken")
    ours(failure(stubs.inference.Generate, ask, "ops"), "NOT_FOUND", "ADAPTER_NOT_FOUND")


HEADERS = [
    ({"name": ""}, "header.adapter"),
    ({"name": "../other"}, "header.adapter"),
    ({"name": "/abs/elsewhere"}, "header.adapter"),
    ({"name": "a/../../b"}, "header.adapter"),
    ({"name": "a\\..\\b"}, "header.adapter"),
    ({"name": "a%2fb"}, "header.adapter"),
    ({"name": "a\0b"}, "header.adapter"),
    ({"name": "."}, "header.adapter"),
    ({"name": "n" * 300}, "header.adapter"),
    ({"name": "dot. "}, "header.adapter"),
    ({"name": "name@alias"}, "header.adapter"),
    ({"alias": "Big"}, "header.alias"),
    ({"alias": "../x"}, "header.alias"),
    ({"alias": "", "expected_generation": 1}, "header.expected_generation"),
]


@pytest.mark.parametrize(("header", "field"), HEADERS)
def test_bad_names_touch_no_disk(stubs: Stubs, files: Files, header: dict[str, Any], field: str) -> None:
    """A name that is a path would lead out of the store."""
    found = push_failure(stubs, files, **header)
    ours(found, "INVALID_ARGUMENT", "INVALID_REQUEST")
    assert found.fields == (field,) and field in found.message


def test_bad_uploads_are_refused(stubs: Stubs, files: Files) -> None:
    header, *pieces = push_parts("broken", files)
    uploads: list[tuple[list[Any], str]] = [
        ([], "header"),
        (pieces, "header"),
        ([header], "chunk"),
        ([header, header, *pieces], "chunk"),
        ([header, pb.PushRequest()], "chunk"),
        ([header, piece("../adapter_config.json")], "chunk.name"),
        ([header, piece("/etc/adapter_config.json")], "chunk.name"),
        ([header, piece("")], "chunk.name"),
        ([header, piece("adapter_model.bin")], "chunk.name"),
        ([header, *pieces, pieces[0]], "chunk.name"),
        ([header, piece(CONFIG, bytes((4 << 20) + 1))], "chunk.data"),
    ]
    for parts, field in uploads:
        found = failure(stubs.adapters.Push, iter(parts), "ops")
        ours(found, "INVALID_ARGUMENT", "INVALID_REQUEST")
        assert found.fields == (field,), found


def test_an_upload_that_is_cut_off_leaves_nothing(stubs: Stubs, files: Files) -> None:
    made = threading.Event()  # gRPC reads from another thread, perhaps before it has returned the call

    def cut() -> Iterator[Any]:
        yield from list(push_parts("broken", files))[:2]
        made.wait()
        call.cancel()
        yield piece(WEIGHTS)

    call = stubs.adapters.Push.future(cut(), metadata=bearer("ops"))
    made.set()
    with pytest.raises(grpc.FutureCancelledError):
        call.result()


def test_adapters_of_another_base_are_refused(stubs: Stubs, files: Files, tmp_path: Path) -> None:
    deeper = push_failure(stubs, tensors(with_extra_layer, files))
    ours(deeper, "FAILED_PRECONDITION", "INCOMPATIBLE_ADAPTER")
    assert "layers.7" in deeper.message
    other = make_base(tmp_path / "other", vocab_size=448, hidden_size=32, num_attention_heads=2)
    folder = make_adapter(tmp_path / "adapter", load_base(other), seed=1)
    found = push_failure(stubs, {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)})
    ours(found, "FAILED_PRECONDITION", "INCOMPATIBLE_ADAPTER")
    assert "q_proj" in found.message or "layers.0" in found.message


def test_a_strict_push_refuses_another_name_of_the_base(stubs: Stubs, files: Files) -> None:
    renamed = config(files, base_model_name_or_path="acme/unheard-of")
    found = push_failure(stubs, renamed, strict_base=True)
    ours(found, "FAILED_PRECONDITION", "INCOMPATIBLE_ADAPTER")
    assert "acme/unheard-of" in found.message


def test_an_adapter_that_overflows_fails_alone(
    stubs: Stubs, main: Pair, files: Files, adapter: Callable[..., Path]
) -> None:
    def explode(weights: Tensors) -> None:
        for name in weights:
            weights[name] *= 1e25

    huge = tensors(explode, files)
    stubs.adapters.Push(push_parts("huge", huge), metadata=bearer("ops"))
    found = failure(stubs.inference.Generate, ask_for("huge"), "ops")
    ours(found, "FAILED_PRECONDITION", "INVALID_LOGITS")
    assert "adapter sha256:" in found.message and "float32" in found.message
    with main.client("ops") as client:
        client.adapters.delete("huge")
        assert undisturbed(client, [9, 8, 7], 8, adapter="quiet").adapter_digest
