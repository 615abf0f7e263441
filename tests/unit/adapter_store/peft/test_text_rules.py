"""Ends and special tokens that an adapter's folder names are honoured where the base does otherwise; the rest
of what it says about text is told."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adapter_store import DataLoss, DiskStore, InvalidAdapter, Manifest, ModelSpec, PushOptions, Ref, Version
from adapter_store.manifest import TextRules
from adapter_store.peft.folder import read_adapter
from adapter_store.peft.text_rules import read_text_rules
from lorafleet.migration import migrate
from tests.support.adapters.tokenizers import byte_level, write_folder
from tests.support.stores.media import Medium, at

Files = Mapping[str, Mapping[str, Any]]
END, TEXT_END, START = "<|im_end|>", "<|endoftext|>", "<|im_start|>"  # the base's ends, others of its tokens
IDS = {token: byte_level().token_to_id(token) for token in (END, TEXT_END, START)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, d0: Path) -> ModelSpec:
    folder = Path(shutil.copytree(d0, tmp_path_factory.mktemp("bases") / "d0"))
    return ModelSpec.from_folder(write_folder(folder, byte_level(), bos=START, eos=END))


@pytest.fixture
def with_files(adapter: Path) -> Callable[[Files], Path]:
    def write(files: Files) -> Path:
        for name, content in files.items():
            (adapter / f"{name}.json").write_text(json.dumps(content))
        return adapter

    return write


def rules(*ends: str, **special: str) -> TextRules:
    return TextRules(tuple(sorted(IDS[end] for end in ends)), tuple(sorted(special.items())))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config": {"eos_token": TEXT_END}}, rules(TEXT_END, eos_token=TEXT_END)),
        ({"tokenizer_config": {"eos_token": {"content": TEXT_END}}}, rules(TEXT_END, eos_token=TEXT_END)),
        ({"special_tokens_map": {"eos_token": TEXT_END}}, rules(TEXT_END, eos_token=TEXT_END)),
        ({"generation_config": {"eos_token_id": IDS[TEXT_END]}}, rules(TEXT_END)),
        ({"generation_config": {"eos_token_id": [*IDS.values()]}}, rules(TEXT_END, START)),
        ({"tokenizer_config": {"bos_token": TEXT_END}}, rules(bos_token=TEXT_END)),
        # As the base, of no matter, or said by nobody.
        ({"tokenizer_config": {"eos_token": END, "bos_token": START}}, rules()),
        ({"generation_config": {"eos_token_id": IDS[END]}}, rules()),
        ({"generation_config": {"eos_token_id": None}}, rules()),
        ({"tokenizer_config": {"pad_token": TEXT_END}}, rules()),
        ({"tokenizer_config": {"bos_token": None}}, rules()),
        ({"tokenizer_config": {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 7}}, rules()),
        ({"tokenizer_config": {"tokenizer_class": "LlamaTokenizer", "eos_token": END}}, rules()),
        # Names that no template could say, or that it has for something else.
        ({"special_tokens_map": {"\x1b[31m_token": START, "a b_token": TEXT_END}}, rules()),
        ({"tokenizer_config": {"messages": 1, "extra_special_tokens": {"messages": START}}}, rules()),
    ],
)  # fmt: skip
def test_what_is_honoured(
    files: Files, expected: TextRules, with_files: Callable[[Files], Path], base: ModelSpec
) -> None:
    adapter = read_adapter(with_files(files), base)
    assert adapter.text == expected and adapter.push.warnings == ()


def test_tokens_that_other_files_of_the_base_add_are_known(
    with_files: Callable[[Files], Path], base: ModelSpec, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(str(base.folder), tmp_path / "base"))
    (folder / "added_tokens.json").write_text('{"<end>": 127}')
    adapter = with_files({"tokenizer_config": {"eos_token": "<end>"}})
    expected = TextRules((127,), (("eos_token", "<end>"),))
    assert read_text_rules(adapter, replace(base, folder=folder)) == (expected, [])


def test_a_folder_that_says_nothing_else_costs_no_parsing_of_tokenizers(
    with_files: Callable[[Files], Path], base: ModelSpec, tmp_path: Path
) -> None:
    """They are of many megabytes; here they could not be parsed."""
    folder = Path(shutil.copytree(str(base.folder), tmp_path / "base"))
    for each in (folder, adapter := with_files({"tokenizer_config": {"eos_token": END, "bos_token": START}})):
        (each / "tokenizer.json").write_text("{")
    assert read_text_rules(adapter, replace(base, folder=folder)) == (rules(), [])


@pytest.mark.parametrize(
    ("files", "reason", "named"),
    [
        ({"tokenizer_config": {"eos_token": "</none>"}}, "UNKNOWN_SPECIAL_TOKEN", "'</none>'"),
        (
            {"special_tokens_map": {"additional_special_tokens": [END, "<a>", "<b>", "<c>", "<d>"]}},
            "UNKNOWN_SPECIAL_TOKEN",
            "'<a>', '<b>', '<c>' and 1 more",
        ),
        (
            {"tokenizer_config": {"extra_special_tokens": {"a_token": "<a>"}}},
            "UNKNOWN_SPECIAL_TOKEN",
            "'<a>'",
        ),
        ({"generation_config": {"temperature": 0.3, "top_p": 0.9}}, "GENERATION_CONFIG_UNUSED", "top_p"),
        ({"tokenizer_config": {"add_eos_token": True}}, "TOKENIZER_RULES_UNUSED", "add_eos_token"),
    ],
)
def test_what_is_not_is_told_by_name(
    files: Files, reason: str, named: str, with_files: Callable[[Files], Path], base: ModelSpec
) -> None:
    adapter = read_adapter(with_files(files), base)
    [warning] = adapter.push.warnings
    assert adapter.text == TextRules() and warning.reason == reason and named in warning.message


@pytest.mark.parametrize(
    ("part", "value", "named"),
    [
        ("normalizer", {"type": "Lowercase"}, "normalizer"),
        ("post_processor", {"type": "ByteLevel", "trim_offsets": True}, "post_processor"),
        ("padding", {"strategy": "BatchLongest"}, None),
        ("truncation", {"max_length": 12}, None),
    ],
)
def test_rules_of_another_tokenizer_are_told(
    part: str, value: Any, named: str | None, adapter: Path, base: ModelSpec
) -> None:
    assert base.folder is not None
    tokenizer = json.loads((base.folder / "tokenizer.json").read_text()) | {part: value}
    (adapter / "tokenizer.json").write_text(json.dumps(tokenizer))
    warnings = read_adapter(adapter, base).push.warnings
    assert [(each.reason, str(named) in each.message) for each in warnings] == (
        [("TOKENIZER_RULES_UNUSED", True)] if named else []
    )


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"generation_config": {"eos_token_id": 128}}, "the vocabulary ends at 128"),
        ({"generation_config": {"eos_token_id": "</s>"}}, "generation_config.json: eos_token_id"),
        ({"special_tokens_map": {"eos_token": 7}}, "eos_token must be a token"),
        ({"special_tokens_map": {"\ud800_token": START}}, "special_tokens_map.json cannot be read"),
        ({"generation_config": {"transformers_version": "\udc00"}}, "generation_config.json cannot be read"),
        # They go with every request.
        ({"generation_config": {"eos_token_id": [*range(70)]}}, "at most 64 are taken"),
        ({"special_tokens_map": {f"a{i}_token": START for i in range(65)}}, "at most 64 may be"),
    ],
)
def test_what_cannot_be_is_refused(
    files: Files, named: str, with_files: Callable[[Files], Path], base: ModelSpec
) -> None:
    with pytest.raises(InvalidAdapter, match=named):
        read_adapter(with_files(files), base)


def test_what_is_honoured_is_a_part_of_the_content(
    medium: Medium, with_files: Callable[[Files], Path], base: ModelSpec, tmp_path: Path
) -> None:
    store = medium.open()
    plain = store.put(with_files({}), "acme", "plain", base)
    same = store.put(with_files({"tokenizer_config": {"eos_token": END}}), "acme", "same", base)
    assert same.digest == plain.digest
    pushed = {
        other: store.put(with_files({"tokenizer_config": {"eos_token": other}}), "acme", "x", base)
        for other in (TEXT_END, START)
    }
    assert len({plain.digest, *(version.digest for version in pushed.values())}) == 3
    for other, version in pushed.items():
        assert store.find(at(version)).manifest.text == rules(other, eos_token=other)
        store.verify(at(version))
        store.open(version.digest).close()
    medium.change_manifest(version.digest, lambda data: data.replace(b"eos_token", b"bos_token"))
    with pytest.raises(DataLoss):
        medium.open().open(version.digest)


def test_what_was_stored_before_anything_was_honoured_keeps_its_digest(
    medium: Medium, with_files: Callable[[Files], Path], base: ModelSpec, tmp_path: Path
) -> None:
    """Refs name digests: a migration makes the version again as it was."""
    source, target = DiskStore(tmp_path / "source"), medium.open()
    plain = source.put(with_files({}), "acme", "plain", base)
    folder = with_files({"tokenizer_config": {"eos_token": TEXT_END}})
    before = source.put(folder, "acme", "x", base, PushOptions(digest=plain.digest))
    honoured = source.put(folder, "acme", "x", base)
    assert before.digest == plain.digest != honoured.digest and before.manifest.text == TextRules()
    assert migrate(source, target, base).failed == {}
    for version in (before, honoured):
        found = target.find(Ref("acme", "x", digest=version.digest))
        assert found.manifest == version.manifest
        target.verify(at(found))


def test_manifests_survive_json(
    store: DiskStore, with_files: Callable[[Files], Path], base: ModelSpec
) -> None:
    manifest = store.put(
        with_files({"tokenizer_config": {"eos_token": TEXT_END}}), "acme", "x", base
    ).manifest
    assert manifest.text != TextRules() and Manifest.from_json(manifest.to_json()) == manifest


def test_a_pull_gives_what_was_said(
    store: DiskStore, with_files: Callable[[Files], Path], base: ModelSpec, tmp_path: Path
) -> None:
    files = {name: {"eos_token": END} for name in ("tokenizer_config", "special_tokens_map")}
    files["generation_config"] = {"eos_token_id": IDS[END]}
    version: Version = store.put(with_files(files), "acme", "x", base)
    store.export(at(version), tmp_path / "out")
    assert {f"{name}.json" for name in files} <= {path.name for path in (tmp_path / "out").iterdir()}
