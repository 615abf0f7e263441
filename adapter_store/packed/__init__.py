"""What is kept: the packed form of an adapter, and the ways into it and back to the pushed files."""
