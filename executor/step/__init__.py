"""The way from a step's plan to logits and tokens, on any device."""
