"""How the dense operations of the reference API run: kernels, block sizes, launches."""
