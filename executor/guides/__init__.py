"""Holding answers to what their requests allow: matchers, and a mask of tokens for each draw."""
