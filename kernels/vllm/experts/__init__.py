"""What vLLM's expert operations run: a step's choices, plain torch forms and Triton kernels."""
