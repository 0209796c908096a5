"""Pages of alerts, and of webhooks that are told of them."""
