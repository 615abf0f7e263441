"""Attention on a GPU: one interface, and four forms of it."""
