"""Tiny tokenizers of the real kinds, made in a second, in folders as models have them."""

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog. STOP and go on, then stop.",
    "你好世界。今天天气很好。我们一起去公园散步吧。",
    "Emoji 😀 🎉 👩‍🚀 🇨🇭 and flags, naïve café, Zürich, ÄÖÜ, µ, ½",
    "def f(x):\n    return x + 1  # comment\n\n\tindent",
] * 3
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level(vocab_size: int = 420) -> Tokenizer:
    """Byte-level BPE as GPT-2, Llama 3, Qwen and SmolLM have it; many tokens are parts of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("plain→added", special=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """SentencePiece-like BPE as Llama 2 and Mistral have it, with a BOS token."""
    words = ["▁", "▁the", "the", "▁stop", "s", "t", "o", "p", "a", "▁a", "好", "."]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def write_folder(
    path: Path,
    tokenizer: Tokenizer,
    *,
    bos: str = "<|im_start|>",
    eos: str = "<|im_end|>",
    chat_template: str | None = None,
) -> Path:
    """What a model folder has of a tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": {"__type": "AddedToken", "content": eos, "special": True},
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.token_to_id(eos)]}))
    if chat_template is not None:
        (path / "chat_template.jinja").write_text(chat_template)
    return path
