"""Pages of money: usage, and what tenants were charged against what engines cost."""
