"""The scheduler's tokenizer against transformers' over the same folder."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from adapter_store import InvalidModel
from lorafleet.constraints.tokens import InvalidTokenizer
from scheduler.text.tokenizer import Tokenizer
from tests.support.adapters.tokenizers import byte_fallback, byte_level, write_folder


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "byte_level":
        return write_folder(folder, byte_level())
    return write_folder(folder, byte_fallback(), bos="<s>", eos="</s>")


@pytest.mark.parametrize(
    "text", ["Hello stop", "你好 😀", " two  spaces ", "<|im_end|>x", "", "plain→added é"]
)
def test_same_ids_and_text_as_transformers(folder: Path, text: str) -> None:
    oracle = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode(text)
    assert ids == oracle.encode(text)
    assert tokenizer.encode(text, add_special_tokens=False) == oracle.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == oracle.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert [tokenizer.token(token_id) for token_id in ids] == oracle.convert_ids_to_tokens(ids)


@pytest.fixture(scope="module")
def parts_of_characters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(tmp_path_factory.mktemp("byte_level"), byte_level()))


@settings(max_examples=300)
@given(ids=st.lists(st.integers(0, 425), max_size=30))
def test_joined_bytes_are_the_decoding(parts_of_characters: Tokenizer, ids: list[int]) -> None:
    joined = b"".join(map(parts_of_characters.token_bytes, ids))
    assert joined.decode(errors="replace") == parts_of_characters.decode(ids)


def test_a_token_s_bytes_are_its_part_of_the_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, byte_fallback(), bos="<s>", eos="</s>"))
    pieces = {tokenizer.token(i): tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    assert pieces["▁the"] == b" the"
    assert pieces["the"] == b"the"
    assert pieces["▁"] == b" "
    assert pieces["<0xE4>"] == b"\xe4"
    assert pieces["好"] == "好".encode()
    assert pieces["</s>"] == b""
    assert tokenizer.token_bytes(10**6) == b""


def test_end_of_sequence_ids_and_special_tokens(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level())
    assert Tokenizer.from_folder(folder).eos_token_ids == {2}
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert Tokenizer.from_folder(folder).eos_token_ids == {1}
    (folder / "config.json").unlink()
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def test_where_the_chat_template_is(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level())
    assert Tokenizer.from_folder(folder).chat_template is None
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": [{"name": "default", "template": "a"}, {"name": "x"}]}))
    assert Tokenizer.from_folder(folder).chat_template == "a"
    config.write_text(json.dumps({"chat_template": "b"}))
    assert Tokenizer.from_folder(folder).chat_template == "b"
    (folder / "chat_template.jinja").write_text("c")
    assert Tokenizer.from_folder(folder).chat_template == "c"


def test_stored_truncation_and_padding_are_off(tmp_path: Path) -> None:
    raw = byte_level()
    raw.enable_truncation(2)
    raw.enable_padding(length=8)
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, raw))
    assert tokenizer.decode(tokenizer.encode("a longer text")) == "a longer text"


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidTokenizer, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    folder = write_folder(tmp_path, byte_level())
    (folder / "tokenizer_config.json").write_text("[")
    with pytest.raises(InvalidModel, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(InvalidTokenizer, match=r"tokenizer\.json: it is a Git LFS pointer"):
        Tokenizer.from_folder(folder)
