"""Adapters in other forms than PEFT's: by the name of a file, what it is and what to do."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

_CONVERT = "`python -m adapter_store.convert FOLDER NEW_FOLDER` makes PEFT's form of it"
_SAVE = "load it where it was made, and save it with PEFT's save_pretrained"
CONVERTIBLE_FILES = {
    "adapter_model.bin": f"is a pickle, which is never loaded; {_CONVERT}",
    "adapters.safetensors": f"is an adapter of mlx-lm; {_CONVERT}",
    "lora.safetensors": f"is an adapter of mistral-finetune; {_CONVERT}",
}
# By pattern of the file's name; the first match counts. lorafleet/foreign.py has the same.
FOREIGN_FILES = {
    **CONVERTIBLE_FILES,
    "adapters.npz": "is an adapter of an early mlx, which keeps no scale; train it again with mlx-lm",
    "*.gguf": "is llama.cpp's; push the PEFT folder that it was made from",
    "ggml-adapter-model*.bin": "is llama.cpp's; push the PEFT folder that it was made from",
    "pytorch_lora_weights.*": "is an adapter of diffusers, for a model that makes images",
    **dict.fromkeys(
        ("*.ckpt", "adapter*.pt", "*lora*.pt", "*lora*.pth", "*.pth.lora"),
        f"is a checkpoint of torch, a pickle, which is never loaded; {_SAVE}",
    ),
    **dict.fromkeys(("model*.safetensors", "pytorch_model*.bin"), "is a whole model and no adapter"),
}


def foreign_file(names: Iterable[str]) -> str:
    """Which of these files is an adapter in another form, and what to do; empty when none is."""
    known = sorted(names)
    for pattern, what in FOREIGN_FILES.items():
        for name in known:
            if fnmatchcase(name, pattern):
                return f"{name} {what}"
    return ""
