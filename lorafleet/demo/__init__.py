"""The demo on this machine: a small chat model from PyPI and four LoRA adapters trained on it."""
