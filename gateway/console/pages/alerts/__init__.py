"""Pages of alerts, and of the webhooks that receive them."""
