"""Batched multi-LoRA operations over tensors and integer slots, one operation a file.

Hugging Face's `kernels` has the same import name and transformers probes it: ours must
look unfit, so this file stays a docstring: import the modules.
"""
