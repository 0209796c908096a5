"""Pages of the scheduling policy: what is in force, and what-ifs."""
