"""Batched multi-LoRA operations over tensors and integer slots. Import the modules; this file stays empty.

Hugging Face's `kernels` has the same import name and transformers probes it: ours must look unfit.
"""
