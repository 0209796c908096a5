"""Pages of tenants: their projects, keys and limits, and what of keys deserves a look."""
