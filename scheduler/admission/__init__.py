"""The checks before a request is accepted: who calls, which version is meant, are all values in range."""
