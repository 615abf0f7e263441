"""The special tokens that a base has because of its tokenizer's class, though no file names them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

# What transformers' classes take for tokens that nobody names: None is no token, whatever tokenizer.json pads
# with. A test holds them against the classes.
DEFAULT_TOKENS: Mapping[str, Mapping[str, str | None]] = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "CodeLlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "Qwen2Tokenizer": {
        "unk_token": "<|endoftext|>",
        "bos_token": None,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    },
    "GPT2Tokenizer": {
        "unk_token": "<|endoftext|>",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": None,
    },
    "GemmaTokenizer": {
        "unk_token": "<unk>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
}
# By model_type. A class of "" has no tokens of its own, whichever one the files name.
_OF_FAMILY: Mapping[str, str] = {
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("mistral", "mixtral"), ""),
}
# Whose published files often name a wrong class, which transformers passes over.
_OFTEN_WRONG = ("qwen2",)


def default_tokens(
    config: Mapping[str, Any], tokenizer_config: Mapping[str, Any], tokenizer_file: Path
) -> Mapping[str, str | None]:
    """Name -> token, by the class that transformers' AutoTokenizer takes for the folder of these files."""
    declared = tokenizer_config.get("tokenizer_class") or config.get("tokenizer_class")
    name, model_type = str(declared or "").removesuffix("Fast"), str(config.get("model_type"))
    if name == "LlamaTokenizer" and model_type not in _OFTEN_WRONG and _is_byte_level(tokenizer_file):
        return {}
    family = _OF_FAMILY.get(model_type)
    if family is not None and (not name or not family or model_type in _OFTEN_WRONG):
        name = family
    return DEFAULT_TOKENS.get(name, {})


def _is_byte_level(tokenizer_file: Path) -> bool:
    """Llama 3 and others name Llama 2's class, for a tokenizer of another kind."""
    return tokenizer_file.is_file() and b'"ByteLevel"' in tokenizer_file.read_bytes()
