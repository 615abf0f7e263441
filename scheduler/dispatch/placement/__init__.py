"""Which executor with room gets a request: homes of versions by hash and traffic, and sessions. Pure."""
