"""An adapter may bring a chat template; a tokenizer only if its ids are the base's."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapter_store import DiskStore, InvalidAdapter, ModelSpec, Version
from adapter_store.peft.folder import read_adapter


def tokenizer(**changes: Any) -> dict[str, Any]:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    return {"model": model, "added_tokens": [{"id": 3, "content": "<s>"}]} | changes


@pytest.fixture
def base(tmp_path: Path, d0: Path) -> Path:
    base = shutil.copytree(d0, tmp_path / "base")
    (base / "tokenizer.json").write_text(json.dumps(tokenizer()))
    return base


@pytest.fixture
def push(store: DiskStore, base: Path, adapter: Path) -> Callable[[], Version]:
    return lambda: store.put(adapter, "default", "x", ModelSpec.from_folder(base))


def model(vocab: Any, merges: Any = (("a", "b"),)) -> dict[str, Any]:
    return {"model": {"type": "BPE", "vocab": vocab, "merges": merges}}


@pytest.mark.parametrize(
    "same",
    [
        tokenizer(),
        tokenizer(model={"type": "BPE", "vocab": {"ab": 2, "a": 0, "b": 1}, "merges": ["a b"]}),
        tokenizer(padding={"strategy": "BatchLongest"}),
        tokenizer(
            model={"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0], ["ab", 0]], "merges": ["a b"]}
        ),
    ],
)
def test_the_same_ids_are_fine(
    adapter: Path, push: Callable[[], Version], store: DiskStore, same: Any
) -> None:
    plain = push().digest
    (adapter / "tokenizer.json").write_text(json.dumps(same))
    (adapter / "added_tokens.json").write_text('{"<s>": 3}')
    assert push().digest == plain


PAD = {"id": 128, "content": "<pad>"}


@pytest.mark.parametrize("pad", ["<pad>", {"content": "<pad>", "lstrip": False}])
def test_a_token_that_only_pads_is_fine(adapter: Path, push: Callable[[], Version], pad: Any) -> None:
    """Unsloth and Axolotl add one where the base has none, perhaps beyond the vocabulary."""
    digest = push().digest
    config = {"pad_token": pad, "added_tokens_decoder": {"128": {"content": "<pad>"}}}
    (adapter / "tokenizer_config.json").write_text(json.dumps(config))
    (adapter / "added_tokens.json").write_text('{"<pad>": 128}')
    added = [{"id": 3, "content": "<s>"}, PAD]
    (adapter / "tokenizer.json").write_text(json.dumps(tokenizer(added_tokens=added)))
    assert push().digest == digest
    (adapter / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": "<s>"}))
    with pytest.raises(InvalidAdapter, match="'<pad>' has id 128"):
        push()


@pytest.mark.parametrize("config", [None, {"pad_token": None}, {"tokenizer_class": "LlamaTokenizer"}])
def test_what_pads_may_stand_in_the_older_file(
    adapter: Path, push: Callable[[], Version], config: Any
) -> None:
    """transformers wrote a token that was added later into special_tokens_map.json alone."""
    digest = push().digest
    if config is not None:
        (adapter / "tokenizer_config.json").write_text(json.dumps(config))
    (adapter / "special_tokens_map.json").write_text('{"pad_token": "<pad>"}')
    (adapter / "added_tokens.json").write_text('{"<pad>": 128}')
    assert push().digest == digest


def test_a_token_that_pads_takes_no_id_of_another(adapter: Path, push: Callable[[], Version]) -> None:
    (adapter / "tokenizer_config.json").write_text('{"pad_token": "<pad>"}')
    for files in ({"<pad>": 3}, {"<s>": 4}):
        (adapter / "added_tokens.json").write_text(json.dumps(files))
        with pytest.raises(InvalidAdapter, match=r"added_tokens\.json: token"):
            push()


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("tokenizer.json", tokenizer(**model({"a": 1, "b": 0, "ab": 2})), "'a' has id 1, in the base 0"),
        (
            "tokenizer.json",
            tokenizer(**model({"a": 0, "b": 1, "ab": 2, "c": 4})),
            "'c' has id 4, in the base None",
        ),
        ("tokenizer.json", tokenizer(**model({"a": 0, "b": 1})), "lacks the base's token 'ab'"),
        ("tokenizer.json", tokenizer(**model({"a": 0, "b": 1, "ab": 2}, [["b", "a"]])), "merges"),
        (
            "tokenizer.json",
            tokenizer(added_tokens=[{"id": 128, "content": "<pad>"}]),
            "vocabulary ends at 128",
        ),
        ("tokenizer.json", {"model": {}}, "is not a tokenizer"),
        ("tokenizer.json", [], "tokenizer.json holds no JSON object"),
        ("added_tokens.json", {"<pad>": 128}, "added_tokens.json: token '<pad>' has id 128"),
        ("added_tokens.json", {"<pad>": "x"}, "damaged"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"4": {"content": "<pad>"}}}, "'<pad>' has id 4"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {}}}, "damaged"),
    ],
)
def test_other_ids_are_refused_by_name(
    adapter: Path, push: Callable[[], Version], file: str, content: Any, complaint: str
) -> None:
    (adapter / file).write_text(json.dumps(content))
    with pytest.raises(InvalidAdapter, match=complaint) as refusal:
        push()
    assert file in str(refusal.value)


def test_a_tokenizer_that_cannot_be_compared_is_refused(
    adapter: Path, spec: ModelSpec, store: DiskStore
) -> None:
    (adapter / "tokenizer.json").write_text(json.dumps(tokenizer()))
    with pytest.raises(InvalidAdapter, match=r"tokenizer.json: the base model has no tokenizer.json"):
        store.put(adapter, "default", "x", spec)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"chat_template.jinja": "{{ a }}"}, "{{ a }}"),
        ({"tokenizer_config.json": '{"chat_template": "{{ b }}"}'}, "{{ b }}"),
        ({"tokenizer_config.json": '{"model_max_length": 5}'}, None),
        (
            {"tokenizer_config.json": '{"chat_template": [{"name": "default", "template": "{{ c }}"}]}'},
            "{{ c }}",
        ),
        ({"tokenizer_config.json": '{"chat_template": {"rag": "", "default": "{{ c }}"}}'}, "{{ c }}"),
        (
            {"chat_template.jinja": "{{ a }}", "tokenizer_config.json": '{"chat_template": "{{ b }}"}'},
            "{{ a }}",
        ),
    ],
)
def test_chat_templates(
    adapter: Path, push: Callable[[], Version], files: dict[str, str], expected: str | None
) -> None:
    plain = push().digest
    for name, text in files.items():
        (adapter / name).write_text(text)
    version = push()
    assert version.manifest.chat_template == expected
    assert (version.digest == plain) == (expected is None)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("chat_template.jinja", b"\xff\xfe", "chat_template.jinja cannot be read"),
        ("chat_template.jinja", b" " * (2 << 20), "chat_template.jinja is larger"),
        ("tokenizer_config.json", b'{"chat_template": 5}', "tokenizer_config.json: chat_template"),
        (
            "tokenizer_config.json",
            b'{"chat_template": "' + b" " * (2 << 20) + b'"}',
            "tokenizer_config.json: chat_template is larger",
        ),
        (
            "tokenizer_config.json",
            b'{"chat_template": [{"name": "default", "template": null}]}',
            "'default' whose template is not a string",
        ),
        ("tokenizer_config.json", b'{"chat_template": ["rag"]}', "neither a string nor a list of named ones"),
        ("chat_template.jinja", b"", "chat_template.jinja is empty"),
        ("chat_template.jinja", b" \n", "chat_template.jinja is empty"),
        ("tokenizer_config.json", b'{"chat_template": ""}', "tokenizer_config.json: chat_template is empty"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json cannot be read"),
    ],
)
def test_bad_chat_templates_are_refused_by_name(
    adapter: Path, push: Callable[[], Version], name: str, content: bytes, complaint: str
) -> None:
    (adapter / name).write_bytes(content)
    with pytest.raises(InvalidAdapter, match=complaint):
        push()


@pytest.mark.parametrize("named", [[], {}, [{"name": "rag", "template": "x"}], {"tool_use": "x"}])
def test_named_templates_without_a_default_leave_the_base_s(
    adapter: Path, base: Path, push: Callable[[], Version], named: Any
) -> None:
    """For other purposes than a plain chat, so that they break none."""
    plain = push().digest
    (adapter / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    warnings = read_adapter(adapter, ModelSpec.from_folder(base)).push.warnings
    found = [warning for warning in warnings if warning.reason == "NO_DEFAULT_TEMPLATE"]
    assert len(found) == 1 and "chats use the base's template" in found[0].message
    assert push().digest == plain
