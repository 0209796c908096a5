"""Pages of what concerns all tenants: upstreams, the audit, the settings of this gateway."""
