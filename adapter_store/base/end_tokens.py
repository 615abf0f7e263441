"""The tokens that end an answer, unless a request says otherwise."""

from pathlib import Path

from adapter_store.base.config import CONFIG_FILE
from adapter_store.base.fields import Fields
from adapter_store.base.special_tokens import TOKENIZER_FILE, added_ids, read_special_tokens

GENERATION_FILE = "generation_config.json"


def read_end_tokens(folder: Path) -> tuple[int, ...]:
    """Their ids: of the first of generation_config.json and config.json that names any, as in transformers;
    else the tokenizer's eos_token. Empty when there is none either.

    Raises InvalidModel, naming the file and the field.
    """
    for name in (GENERATION_FILE, CONFIG_FILE):
        if ids := Fields.from_file_if_there(folder / name).token_ids("eos_token_id"):
            return ids
    token = read_special_tokens(folder).named.get("eos_token")
    token_id = read_vocabulary(folder).get(token or "")
    return () if token_id is None else (token_id,)


def read_vocabulary(folder: Path) -> dict[str, int]:
    """Token -> id, of tokenizer.json. Raises InvalidModel."""
    tokenizer = Fields.from_file_if_there(folder / TOKENIZER_FILE)
    match tokenizer.values.get("model"):
        case {"vocab": dict(ids)}:
            return {**ids, **added_ids(tokenizer)}
        case {"vocab": [[str(), _], *_] as pieces}:  # of Unigram: [token, score] in the order of their ids
            return {**{piece[0]: token_id for token_id, piece in enumerate(pieces)}, **added_ids(tokenizer)}
    return added_ids(tokenizer)
