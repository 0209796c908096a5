"""The audited acts of a server's settings: for the server itself, and for the command line."""

from __future__ import annotations

from ops.settings.settings import Settings
from tenants.admin.admin import Admin
from tenants.admin.transaction import Transactions
from tenants.storage.database import Database


def open_admin(settings: Settings, pepper: bytes, database: Database, console_url: str = "") -> Admin:
    """`console_url`: where the console answers, unless the settings say."""
    transactions = Transactions(
        database,
        pepper,
        tier_multipliers=settings.tier_multipliers,
        alert_misses=settings.gateway.alert_misses,
        webhook_private=settings.gateway.webhook_private,
        models=settings.pool_names,
        console_url=settings.gateway.console_url or console_url,
    )
    return Admin(transactions)
