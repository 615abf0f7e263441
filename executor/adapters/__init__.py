"""An adapter's road from the store to host memory to a slot, and which adapters may stay."""
