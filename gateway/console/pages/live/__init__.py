"""Pages of what goes on now: overview, waiting requests."""
