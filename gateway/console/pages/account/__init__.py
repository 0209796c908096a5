"""Pages of the own account: log-in, password, sessions, and what the role allows."""
