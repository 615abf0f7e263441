"""The store in a folder, shared by any number of processes."""
