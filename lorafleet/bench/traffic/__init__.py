"""Traffic as it comes: which adapters it names, how much of it can be served, and what it waits for."""
