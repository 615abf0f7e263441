"""Tokens and text: the tokenizer, chat templates, and the stream that finds stop strings."""
