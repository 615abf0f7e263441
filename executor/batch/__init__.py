"""The choice of tokens for the next step: sequences, KV blocks, slots. Pure Python, without torch."""
