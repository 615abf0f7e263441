"""Where executors are found: in a list, under a name in DNS, in a file; and what changes there."""
