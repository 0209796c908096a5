"""Pages of people: all of them, and one."""
