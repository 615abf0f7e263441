"""The demo's real parts: a small chat model from PyPI and the LoRA adapters trained on it."""
