"""The calls of operators: push, pull, alias, pin, verify, collect, and the retirement of versions."""
