"""One base model on its device: loads it, pages adapters into slots, runs the mixed continuous batch."""
