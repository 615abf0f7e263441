"""Stores of formats 2 and 3, read once: `lorafleet adapters migrate` copies them into a new one."""
