"""Records."""

from __future__ import annotations

from tenants.instants import from_us as from_us
from tenants.instants import to_us as to_us
from tenants.nouns.key import ApiKey as ApiKey
from tenants.nouns.project import Project as Project
from tenants.nouns.tenant import Tenant as Tenant
from tenants.nouns.tenant import tier_names as tier_names
