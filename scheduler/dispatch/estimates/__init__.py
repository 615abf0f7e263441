"""How long requests will take, learned from those before, and who is refused for it. Pure."""
