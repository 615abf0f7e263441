"""Plain torch forms of every operation: the truth that kernels are tested against, and the CPU path."""
