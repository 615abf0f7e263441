"""The reference API of multi-LoRA kernels to the letter, over ours, and a plugin for vLLM."""
