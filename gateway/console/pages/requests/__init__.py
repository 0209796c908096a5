"""Pages of requests: ended ones, one of them, refused ones, targets and their misses, quotes."""
