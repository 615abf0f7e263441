"""Special tokens, added tokens and ends are those of transformers, whichever of its files name them."""

import json
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as Library
from transformers import AutoTokenizer, TokenizersBackend

from adapter_store import InvalidModel
from adapter_store.base.end_tokens import read_end_tokens
from adapter_store.base.special_tokens import USUAL_NAMES, read_special_tokens
from adapter_store.base.tokenizer_class import DEFAULT_TOKENS
from scheduler.text.tokenizer import Tokenizer
from tests.support.adapters.tokenizers import byte_fallback, byte_level

Files = Mapping[str, Mapping[str, Any]]
OBJECT = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
BOS = {"content": "<s>", **OBJECT}
ADDED_BOS = {"__type": "AddedToken", **BOS, "special": True}
LISTED = {"1": {**BOS, "special": True}, "260": {"content": "the", **OBJECT, "special": True}}
LLAMA: Files = {"tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer"}}
ENDS = {"bos_token": "<s>", "eos_token": "</s>"}
TEXT = "<s>stop the</s> <pad>"


def files(tokenizer_config: Mapping[str, Any], **others: Mapping[str, Any]) -> Files:
    return {
        "tokenizer_config.json": tokenizer_config,
        **{f"{name}.json": text for name, text in others.items()},
    }


# What the folder says beside tokenizer.json. Each names its tokens in another place or form.
FOLDERS: Mapping[str, Files] = {
    "nothing": {},
    "map alone": {"special_tokens_map.json": {"bos_token": "<s>", "eos_token": BOS | {"content": "</s>"}}},
    "map, as an object": files({}, special_tokens_map={"bos_token": BOS}),
    "config alone": files({"bos_token": "<s>", "eos_token": ADDED_BOS}),
    "null in the config": files({"bos_token": None}, special_tokens_map={"bos_token": "<s>"}),
    "null in the map": files({"bos_token": "<s>"}, special_tokens_map={"bos_token": None}),
    "map against config": files({"bos_token": "</s>"}, special_tokens_map={"bos_token": "<s>"}),
    "the map is not read": files(
        {"bos_token": None, "added_tokens_decoder": LISTED}, special_tokens_map={"bos_token": "<s>"}
    ),
    "a listed token of another form": files({"added_tokens_decoder": LISTED, "bos_token": "<s>"}),
    "class alone": LLAMA,
    "fast class alone": files({"tokenizer_class": "LlamaTokenizerFast"}),
    "class and null": files({"tokenizer_class": "LlamaTokenizer", "bos_token": None}),
    "class and map": files({"tokenizer_class": "LlamaTokenizer"}, special_tokens_map={"eos_token": "stop"}),
    "empty": files({"bos_token": "", "eos_token": "", "tokenizer_class": "LlamaTokenizer"}),
    "no class": files({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}),
    "gpt-2": files({"tokenizer_class": "GPT2Tokenizer"}),
    "qwen": files({"tokenizer_class": "Qwen2Tokenizer", "pad_token": "<pad>"}),
    "class in config.json": {"config.json": {"tokenizer_class": "LlamaTokenizer"}},
    "names of its own": files({"image_token": "<image>", "bos_token": "<s>", "add_bos_token": True}),
    "more in a list": files({"additional_special_tokens": ["the", "<x>"], "pad_token": "<pad>"}),
    "more by name": files({"extra_special_tokens": {"video_token": "<video>"}}),
    "more in the map": files({}, special_tokens_map={"additional_special_tokens": ["the", "<x>"]}),
    "added": files({"pad_token": "<pad>"}, added_tokens={"<pad>": 271, "<plain>": 272, "</s>": 2}),
    "adds both ends": files(
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    ),
    "adds neither": files({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}),
}
MODEL_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gpt_oss")


def write(folder: Path, tokenizer: Library, model_type: str, said: Files) -> Path:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"model_type": model_type, **said.get("config.json", {})}
    for name, text in {**said, "config.json": config}.items():
        (folder / name).write_text(json.dumps(text))
    return folder


def padded() -> Library:
    tokenizer = byte_fallback()
    tokenizer.enable_padding(pad_token="<unk>")
    return tokenizer


@pytest.mark.parametrize("kind", [byte_fallback, byte_level, padded])
@pytest.mark.parametrize("said", FOLDERS.values(), ids=FOLDERS)
def test_named_tokens_are_those_of_transformers(kind: Any, said: Files, tmp_path: Path) -> None:
    folder = write(tmp_path / "base", kind(), "llama", said)
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.vocab_size == len(theirs)
    assert [ours.token(i) for i in range(len(theirs))] == theirs.convert_ids_to_tokens(range(len(theirs)))
    # Some classes make pieces of plain text by rules of their own; the services go by tokenizer.json.
    text = TEXT if type(theirs) is TokenizersBackend else "<s></s>"
    for special in (True, False):
        assert ours.encode(text, add_special_tokens=special) == theirs.encode(
            text, add_special_tokens=special
        )
    assert ours.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


def test_a_token_that_the_model_has_no_id_for_stays_text(tmp_path: Path) -> None:
    """transformers gives it one, with which the model then fails."""
    tokenizer = byte_fallback()
    said = dict(files({"pad_token": "<pad>", "bos_token": "<x>"}))
    for room, tokens in ((0, []), (1, ["<x>"]), (2, ["<x>", "<pad>"])):
        said["config.json"] = {"vocab_size": tokenizer.get_vocab_size() + room}
        folder = write(tmp_path / str(room), tokenizer, "llama", said)
        ours = Tokenizer.from_folder(folder)
        new = range(tokenizer.get_vocab_size(), ours.vocab_size)
        assert [ours.token(token_id) for token_id in new] == tokens
        assert max(ours.encode("<x><pad>")) < ours.vocab_size <= said["config.json"]["vocab_size"]
        assert ours.special_tokens["pad_token"] == "<pad>"


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_class_of_a_tokenizer_depends_on_the_family(model_type: str, tmp_path: Path) -> None:
    classes = (None, "LlamaTokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer", "PreTrainedTokenizerFast")
    for number, kind in enumerate((byte_fallback, byte_level)):
        for tokenizer_class in classes:
            said = files({"tokenizer_class": tokenizer_class} if tokenizer_class else {})
            folder = write(tmp_path / f"{number} {tokenizer_class}", kind(), model_type, said)
            theirs = AutoTokenizer.from_pretrained(folder).special_tokens_map
            assert read_special_tokens(folder).named == theirs, (tokenizer_class, kind)


@pytest.mark.parametrize("name", DEFAULT_TOKENS)
def test_tokens_of_a_class_are_those_that_it_takes(name: str) -> None:
    parameters = signature(getattr(transformers, name).__init__).parameters
    usual = {token: parameter.default for token, parameter in parameters.items() if token in USUAL_NAMES}
    assert usual == DEFAULT_TOKENS[name]


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        (files({"bos_token": 1}), "tokenizer_config.json: bos_token must be a token, not 1"),
        (files({}, special_tokens_map={"eos_token": ["</s>"]}), "eos_token must be a token"),
        (files({"added_tokens_decoder": ["<s>"]}), "added_tokens_decoder"),
        (files({"added_tokens_decoder": {"one": BOS}}), "added_tokens_decoder"),
        (files({}, added_tokens={"<pad>": "3"}), "added_tokens.json must give each token an id"),
        ({"generation_config.json": {"eos_token_id": True}}, "eos_token_id must be token ids"),
        ({"generation_config.json": {"eos_token_id": ["</s>"]}}, "eos_token_id must be token ids"),
    ],
)
def test_other_things_are_refused_by_name(said: Files, complaint: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "base", byte_fallback(), "llama", said)
    with pytest.raises(InvalidModel, match=complaint):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("said", "ends"),
    [
        ({"generation_config.json": {"eos_token_id": [5, 6]}, "config.json": {"eos_token_id": 7}}, (5, 6)),
        ({"generation_config.json": {"eos_token_id": []}, "config.json": {"eos_token_id": [7, 8]}}, (7, 8)),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 0}}, (0,)),
        (files({"eos_token": "</s>"}), (2,)),
        (files({"eos_token": "<none>"}), ()),
        (LLAMA, (2,)),
        ({}, ()),
    ],
)
def test_what_ends_an_answer(said: Files, ends: tuple[int, ...], tmp_path: Path) -> None:
    folder = write(tmp_path / "base", byte_fallback(), "llama", said)
    assert read_end_tokens(folder) == ends
    assert Tokenizer.from_folder(folder).eos_token_ids == set(ends)


def test_an_end_is_found_in_the_vocabulary_of_a_unigram_model(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    model = {"type": "Unigram", "vocab": [["<unk>", 0.0], ["</s>", -1.0]], "unk_id": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
    assert read_end_tokens(tmp_path) == (1,)
