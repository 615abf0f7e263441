"""LoRA around a plain model: the slots' layout, their memory, and the adapter images that fill them."""
