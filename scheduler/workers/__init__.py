"""Work that nobody vouches for, in processes that are stopped when it takes too much."""
