"""Parts that the pages of tenants, keys and limits share: what is shown, what forms say. Mostly pure."""
