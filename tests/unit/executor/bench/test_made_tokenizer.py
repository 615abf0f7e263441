"""The benchmark's made-up tokenizer."""

import json
from pathlib import Path

from executor.bench.guided import PERSON, schema
from executor.bench.made_tokenizer import write_tokenizer
from lorafleet.constraints.grammar import matcher_of
from lorafleet.constraints.tokens import guide_tokenizer, read_tokenizer


def test_it_is_the_same_every_time_and_has_as_many_tokens_as_asked(tmp_path: Path) -> None:
    assert write_tokenizer(tmp_path, 2000) == 1999
    first = (tmp_path / "tokenizer.json").read_bytes()
    write_tokenizer(tmp_path, 2000)
    assert (tmp_path / "tokenizer.json").read_bytes() == first
    tokenizer = read_tokenizer(tmp_path)
    text = 'A text, with "signs" and 12 digits: ü.'
    assert tokenizer.get_vocab_size() == 2000
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_benchmarks_text_fits_its_schema(tmp_path: Path) -> None:
    end = write_tokenizer(tmp_path, 2000)
    guide = guide_tokenizer(tmp_path, 2000, [end])
    assert matcher_of(guide, schema("name")).consume_tokens(guide.tokenize_str(json.dumps([PERSON])[:-1]))
    whole = matcher_of(guide, schema("name", least=1))
    assert whole.consume_tokens(guide.tokenize_str(json.dumps([PERSON]))) and whole.is_accepting()
